"""AReaL's `areal.experimental.openai.client` (re-exports `ArealOpenAI`)."""

from areal_hpc.client.areal_openai import ArealOpenAI

__all__ = ["ArealOpenAI"]
