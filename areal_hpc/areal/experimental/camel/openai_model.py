"""AReaL's `areal.experimental.camel.openai_model` (re-exports)."""

from areal_hpc.client.camel import AReaLOpenAICompatibleModel

__all__ = ["AReaLOpenAICompatibleModel"]
