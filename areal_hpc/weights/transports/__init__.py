"""Transports of weights: broadcast through process groups, or folders on disk."""
