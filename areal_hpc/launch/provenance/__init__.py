"""Provenance of a launch: versions, commits, differences and the user's code."""
