"""Batch scripts: resources and container."""
