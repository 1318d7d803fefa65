"""A model for CAMEL agents."""

from areal_hpc.client.camel import AReaLOpenAICompatibleModel

__all__ = ["AReaLOpenAICompatibleModel"]
