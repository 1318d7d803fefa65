"""Audit of a run: the status of every ticket, judged from files alone."""
