"""Objective of a batch: advantages, importance weights, policy and value loss, statistics."""
