"""AReaL's `areal.utils` package."""
