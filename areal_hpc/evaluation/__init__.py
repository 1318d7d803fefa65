"""Metrics of evaluation sets, computed from the rewards of samples, with their intervals."""
