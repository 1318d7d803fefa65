"""Coding harnesses as agents."""
