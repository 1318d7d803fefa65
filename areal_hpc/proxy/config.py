"""Configuration of the proxy process, and limits on its clients."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.recipe.sections.inference import ProxyConfig


class ProxyLimits(ProxyConfig):
    """Limits on the proxy's clients; a recipe sets the time limits alone."""

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
    """Bytes of one request; larger ones are refused with status 413."""


class ProxyJobConfig(ProcessConfig):
    ENTRY = "areal_hpc.proxy.job:run"
    ROLE = "agents"

    cell: str
    """Name of the cell, also as the writer of its shards."""
    model_path: Path
    """Model in Hugging Face format: its tokenizer, template and vocabulary size are used."""
    serve_python: str = ""
    """Interpreter of SGLang's environment, which runs its parsers."""
    limits: dict[str, int] = Field(default_factory=dict)
    """Values of `ProxyLimits` that replace its defaults."""

    @property
    def proxy_limits(self) -> ProxyLimits:
        return ProxyLimits.model_validate(self.recipe.proxy.model_dump() | self.limits)
