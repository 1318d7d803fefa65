"""Processes of a job: supervisor, starts, restart policy, signals, time limit, topology."""
