"""Coding harnesses and other command-line programs as agents."""
