"""AReaL's `areal.experimental` package (re-exports)."""
