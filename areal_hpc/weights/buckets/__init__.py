"""Buckets of weights: plan, filling, pipeline."""
