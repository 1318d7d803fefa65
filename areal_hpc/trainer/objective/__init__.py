"""Objective of a batch: advantages, importance weights and the loss."""
