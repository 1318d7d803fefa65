"""Evaluations of a run, as they go on and when they are over."""
