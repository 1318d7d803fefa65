"""Self-tests of a machine by the trainer's own parts, run one process each (`python -m`)."""
