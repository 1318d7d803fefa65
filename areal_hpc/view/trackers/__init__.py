"""Trackers: programs that take a run's metrics to where teams look at them, fed from its files."""
