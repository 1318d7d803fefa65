"""Checkpoints: atomic directories, written asynchronously, restored in any layout, exported."""
