"""AReaL's `areal.workflow.anthropic` package."""
