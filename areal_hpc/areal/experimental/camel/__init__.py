"""AReaL's `areal.experimental.camel` package."""
