"""The client that records."""

from areal_hpc.client.areal_openai import ArealOpenAI

__all__ = ["ArealOpenAI"]
