"""AReaL's `areal.workflow.openai_agent` package."""
