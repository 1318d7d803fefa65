"""Checks, before a start, of everything that a recipe refers to."""
