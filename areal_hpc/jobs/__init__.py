"""Processes of a job: supervisor, restarts, signals, time limit, topology."""
