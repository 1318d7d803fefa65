"""Present state of a run: its jobs, progress and health."""
