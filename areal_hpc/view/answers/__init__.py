"""Answers about a run in sentences: why it is slow, what changed at a step, does it collapse."""
