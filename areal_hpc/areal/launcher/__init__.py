"""AReaL's `areal.launcher` package."""
