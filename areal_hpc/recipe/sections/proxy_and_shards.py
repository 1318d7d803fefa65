"""Recipe sections `proxy` and `shards`."""

from typing import Annotated

from pydantic import Field

from areal_hpc.recipe.base import BaseConfig


class ShardConfig(BaseConfig):
    """Journal and sealed shards."""

    seal_after_s: Annotated[float, Field(gt=0)] = 30.0
    """Seal at the latest this long after the first finished ticket."""


class ProxyConfig(BaseConfig):
    """The OpenAI-compatible endpoint of a cell."""

    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time one model call may take, waiting for a replica included."""
    session_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Drop a session after this idle time, if all sessions of its ticket are idle."""
    message_normalizer: str | None = None
    """`package.module:function` that normalizes each message before comparison and rendering."""
