"""Clients that record model calls within the agent's own process: for OpenAI's SDK and CAMEL."""
