"""AReaL's `areal.workflow.openhands` package."""
