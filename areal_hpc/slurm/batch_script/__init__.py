"""Batch scripts: resources, container, and the options that chain jobs."""
