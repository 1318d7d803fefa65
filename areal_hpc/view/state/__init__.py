"""What a run is doing now: its jobs, progress and health."""
