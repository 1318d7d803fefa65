"""Processes in which agents run: worker pools, pickling, reward functions."""
