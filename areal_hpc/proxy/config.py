"""Typed configuration of the proxy process."""

from pathlib import Path

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.recipe.sections.proxy_and_shards import ProxyConfig, ShardConfig


class ProxyJobConfig(ProcessConfig):
    ENTRY = "areal_hpc.proxy.job:run"
    ROLE = "agents"

    cell: str
    """Also the writer name of its shards."""
    proxy: ProxyConfig = ProxyConfig()
    shards: ShardConfig = ShardConfig()
    model_path: Path
    """Model in Hugging Face format: its tokenizer, template and vocabulary size are used."""
    model_name: str
    context_tokens: int | None = None
    """Longest prompt plus reply that the replicas accept; the model's own limit when null."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    serve_python: str = ""
    """Interpreter of SGLang's environment; its parsers run there."""
    online: bool = False
    """Programs open sessions themselves, and play the tickets' episodes in them."""
