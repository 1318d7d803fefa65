"""AReaL's `areal.workflow.openai` package."""
