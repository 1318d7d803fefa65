"""AReaL's `areal.reward` package."""
