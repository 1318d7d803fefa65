"""AReaL's `areal.workflow.camel` package."""
