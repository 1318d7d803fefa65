"""Metrics of training steps: rows, files, TensorBoard."""
