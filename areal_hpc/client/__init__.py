"""The proxy's sessions within the agent's own process: `ArealOpenAI`, and a model for CAMEL."""
