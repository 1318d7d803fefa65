"""AReaL's `areal.workflow.langchain` package."""
