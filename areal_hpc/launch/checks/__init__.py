"""Checks of what a recipe refers to, before anything starts."""
