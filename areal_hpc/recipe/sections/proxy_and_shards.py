"""Recipe sections `proxy` and `shards`."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from areal_hpc.recipe.base import BaseConfig


class ShardConfig(BaseConfig):
    """Journal and sealed shards."""

    target_bytes: Annotated[int, Field(ge=4096)] = 128 * 1024 * 1024
    """Seal a shard when the journal reaches this size; large files reduce Lustre metadata load."""
    seal_after_s: Annotated[float, Field(gt=0)] = 30.0
    """Seal at the latest this long after the first finished ticket."""
    journal_dir: Path | None = None
    """Node-local folder of journals; `$SLURM_TMPDIR` or the system's temporary folder when null."""


class ProxyConfig(BaseConfig):
    """The OpenAI-compatible endpoint of a cell."""

    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time one model call may take, waiting for a replica included."""
    session_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Drop a session after this idle time, if all sessions of its ticket are idle."""
    max_sessions: Annotated[int, Field(ge=1)] = 65536
    """Sessions open at once; further ones are refused with status 429."""
    max_concurrent_calls: Annotated[int, Field(ge=1)] = 8192
    """Replies generated at once, two open files each; further calls get status 429, Retry-After."""
    max_calls_per_session: Annotated[int, Field(ge=1)] = 256
    """Model calls of one session answered at once; further ones are refused with status 429."""
    max_session_bytes: Annotated[int, Field(ge=1024)] = 128 * 1024 * 1024
    """Bytes that one session may record; its further calls are refused with status 400."""
    max_messages: Annotated[int, Field(ge=1)] = 4096
    """Messages in one request; longer conversations are refused with status 400."""
    max_request_bytes: Annotated[int, Field(ge=1024)] = 32 * 1024 * 1024
    """Larger requests are refused with status 413."""
    dropped_tools: tuple[str, ...] = (
        "apply_patch*",
        "bash_*",
        "code_execution*",
        "code_interpreter*",
        "computer*",
        "file_search*",
        "image_generation*",
        "local_shell*",
        "mcp*",
        "memory_*",
        "shell*",
        "text_editor_*",
        "tool_search*",
        "web_fetch*",
        "web_search*",
    )
    """Types of tools that only a provider's models or servers know: never told to the model."""
    message_normalizer: str | None = None
    """`package.module:function` that normalizes each message before comparison and rendering."""
