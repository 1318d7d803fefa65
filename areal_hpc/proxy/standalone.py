"""Standalone proxy in front of SGLang servers given by address, without a run."""

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.processes.process_setup import StopRequest, raise_open_file_limit
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.router import StaticReplicaSource
from areal_hpc.proxy.service import LISTEN_BACKLOG, ProxyService, run_in_uvloop_thread
from areal_hpc.proxy.sessions.recorder import JournaledRecorder, MemoryRecorder
from areal_hpc.recipe.base import BaseConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.files import UMASKS

log = logging.getLogger(__name__)


class StandaloneProxyConfig(BaseConfig):
    upstreams: list[str]
    """Addresses of SGLang servers that serve the same model."""
    tokenizer: Path
    """Model in Hugging Face format: its tokenizer, template and vocabulary size are used."""
    host: str
    port: int = Field(ge=0, le=65535)
    admin_key_file: Path
    """File with the key that opens sessions; created if it is missing."""
    journal: Path | None
    """Folder of the journal, from which a restarted proxy restores sessions; null: memory alone."""
    tool_call_parser: str | None
    reasoning_parser: str | None
    serve_python: str
    """Interpreter of SGLang's environment, which runs its parsers."""
    context_length: int | None
    """Maximum prompt plus reply, in tokens; null: the model's limit."""
    drain_timeout_s: int
    """Longest time to finish open calls after a stop signal."""
    proxy: ProxyLimits

    @field_validator("upstreams")
    @classmethod
    def _check_urls(cls, upstreams: list[str]) -> list[str]:
        for url in upstreams:
            parts = urlsplit(url)
            if "@" in parts.netloc:
                raise ValueError(f"no user or password is sent to an upstream ({parts.hostname})")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"an upstream is an address such as http://host:30000, got {url}")
        return upstreams


def run(config: StandaloneProxyConfig, print_line: Callable[[str], None]) -> None:
    """Serve until a stop signal; print the address through `print_line` once it listens."""
    os.umask(UMASKS["owner"])
    raise_open_file_limit()
    stop = StopRequest.install()
    run_in_uvloop_thread(_serve_standalone(config, stop, print_line))


async def _serve_standalone(
    config: StandaloneProxyConfig, stop: StopRequest, print_line: Callable[[str], None]
) -> None:
    model = ServedModel.from_model_dir(
        config.tokenizer.resolve().name,
        config.tokenizer,
        config.context_length,
        config.tool_call_parser,
        config.reasoning_parser,
    )
    admin_key = rendezvous.ensure_admin_key(config.admin_key_file)
    vocab_size = model.encoder.vocab_size
    recorder: JournaledRecorder = MemoryRecorder(vocab_size)
    if config.journal is not None:
        config.journal.mkdir(mode=0o700, parents=True, exist_ok=True)
        recorder = JournaledRecorder(config.journal / "journal", vocab_size)
    source = StaticReplicaSource(config.upstreams)
    service = ProxyService(config.proxy, model, config.serve_python, admin_key, recorder, source)
    try:
        listener = _open_listener(config.host, config.port)
        print_line(_render_welcome(config, listener.getsockname()[1]))
        for replica in await source.fetch_replicas():
            if replica.state == "failed":
                log.warning("no server answers at %s yet; calls wait for one", replica.url)
        await service.run(listener, stop, config.drain_timeout_s)
    finally:
        await service.close()


def _open_listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise ClusterError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="give another --port or --host",
        ) from error


def _render_welcome(config: StandaloneProxyConfig, port: int) -> str:
    url = f"http://{config.host}:{port}"
    return f"""\
areal-hpc proxy listens on {url}, in front of {", ".join(config.upstreams)}
open a session:
  sed 's/^/authorization: Bearer /' {config.admin_key_file} | curl -s {url}/rl/start_session -H @- \
-d '{{"task_id": "try"}}'
its api_key, and base_url {url}/v1, are all that an agent needs; rewards and the end take its \
control_key; \
{"the journal is in " + str(config.journal) if config.journal else "sessions are lost on exit"}"""
