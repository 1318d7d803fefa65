"""Evaluation sets: what is computed from the rewards of their samples, and how sure it is."""
