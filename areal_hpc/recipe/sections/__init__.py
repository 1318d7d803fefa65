"""Sections of the recipe, one module per section."""
