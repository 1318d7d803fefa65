"""The proxy process of a cell: replay, listen, publish, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvicorn
import uvloop

from areal_hpc.cluster import rendezvous
from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.cluster.topology import advertised_host
from areal_hpc.config import StageConfig
from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.layout import RunLayout
from areal_hpc.proxy.app import ProxyApp
from areal_hpc.proxy.calls import ModelCaller
from areal_hpc.proxy.config import ProxyConfig
from areal_hpc.proxy.control import Control
from areal_hpc.proxy.events import SessionDropped
from areal_hpc.proxy.model_call import ServedModel
from areal_hpc.proxy.parsing import SGLangParsers
from areal_hpc.proxy.recorder import Recorder
from areal_hpc.proxy.routing import Router
from areal_hpc.proxy.sealing import Sealer
from areal_hpc.proxy.upstream import Upstream
from areal_hpc.session.template import ChatTemplate, TokenEncoder
from areal_hpc.shards.config import ShardConfig

log = logging.getLogger(__name__)

STOP_POLL_S = 0.05
LISTEN_BACKLOG = 2048
LAST_SEAL_TIMEOUT_S = 2.0
IDLE_CHECK_S = 5.0


class ProxyJobConfig(StageConfig):
    """What one cell's proxy must know."""

    run_dir: Path
    cell: str
    """Also the writer name of its shards."""
    proxy: ProxyConfig = ProxyConfig()
    shards: ShardConfig = ShardConfig()
    model_path: Path
    """Model in Hugging Face format: its tokenizer, template and vocabulary size are used."""
    model_name: str
    """What `/v1/models` calls the model."""
    context_tokens: int | None = None
    """Longest prompt plus reply that the replicas accept; the model's own limit when null."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    serve_python: str = ""
    """Interpreter of SGLang's environment; its parsers run there."""


def run(config: dict[str, Any]) -> None:
    """Serve until a stop signal; then seal what is finished.

    Raises:
        RecipeError: The model directory lacks a tokenizer or a chat template.
        ClusterError: The journal or a peer failed; another start may succeed.
    """
    job = ProxyJobConfig.model_validate(config)
    stop = StopRequest.install()
    # uvloop claims the wake-up descriptor of the main thread, by which StopRequest hears signals.
    with ThreadPoolExecutor(1, thread_name_prefix="proxy-loop") as loop_thread:
        loop_thread.submit(uvloop.run, _serve(job, stop)).result()


async def _serve(job: ProxyJobConfig, stop: StopRequest) -> None:
    layout = RunLayout(job.run_dir)
    admin_key = rendezvous.ensure_admin_key(layout.admin_key)
    model = ServedModel(
        job.model_name,
        ChatTemplate.from_model_dir(job.model_path),
        TokenEncoder.from_model_dir(job.model_path),
        job.context_tokens or read_context_tokens(job.model_path),
        job.tool_call_parser,
        job.reasoning_parser,
    )
    parsers = None
    if job.tool_call_parser or job.reasoning_parser:
        parsers = SGLangParsers(job.serve_python, job.tool_call_parser, job.reasoning_parser)
    recorder = Recorder(journal_path(job, admin_key), job.shards.sync_interval_s)
    sealer = Sealer(recorder, layout, job.cell, job.shards, admin_key)
    sealer.recover()
    router = Router(layout.rendezvous_dir, job.cell, admin_key)
    upstream = Upstream()
    app = ProxyApp(
        admin_key=admin_key,
        max_request_bytes=job.proxy.max_request_bytes,
        model=model,
        book=recorder.book,
        caller=ModelCaller(model, router, upstream, recorder, job.proxy.request_timeout_s, parsers),
        control=Control(recorder, router, sealer, job.proxy.max_sessions),
    )
    name = f"proxy-{job.cell}"
    listener = _listen(layout.rendezvous_dir, name)
    host, port = listener.getsockname()[:2]
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
        )
    )
    try:
        rendezvous.publish(layout.rendezvous_dir, name, f"http://{host}:{port}")
        log.info("%s listens on %s:%d", name, host, port)
        await _until_first_ends(
            server.serve(sockets=[listener]),
            router.follow(),
            sealer.run(),
            _drop_idle_sessions(recorder, job.proxy.session_timeout_s),
            _stop_requested(stop, recorder),
            *([parsers.run()] if parsers is not None else []),
        )
        with contextlib.suppress(TimeoutError, ClusterError):
            await asyncio.wait_for(sealer.seal_now(), LAST_SEAL_TIMEOUT_S)
    finally:
        for closing in (router.close(), upstream.close(), sealer.close()):
            await closing
        recorder.close()
    rendezvous.withdraw(layout.rendezvous_dir, name)
    if layout.finished.exists() and not recorder.book.finished and not recorder.book.sealed:
        shutil.rmtree(recorder.folder)  # nobody will read that journal again


def _listen(directory: Path, name: str) -> socket.socket:
    """A listening socket: where the cell's crashed proxy listened, so that agents find this one.

    An agent keeps the address it was given; its client repeats calls that lost their connection.
    """
    host = advertised_host()
    before = rendezvous.find(directory, name)
    ports = [0]
    if before is not None and urlsplit(before.url).hostname == host:
        ports.insert(0, urlsplit(before.url).port or 0)
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=LISTEN_BACKLOG)
        except OSError as error:
            log.warning("cannot listen on %s:%d: %s", host, port, error)
    raise ClusterError(f"no port of {host} is free", hint="set AREAL_HPC_HOST to an own address")


async def _until_first_ends(*services: Coroutine[Any, Any, None]) -> None:
    """Run all until one returns or raises; then cancel the others."""
    tasks = [asyncio.ensure_future(service) for service in services]
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()


async def _stop_requested(stop: StopRequest, recorder: Recorder) -> None:
    """Returns on a stop signal; raises when the journal refused."""
    while not stop.requested:
        if recorder.failure is not None:
            raise recorder.failure
        await asyncio.sleep(STOP_POLL_S)


async def _drop_idle_sessions(recorder: Recorder, timeout_s: float) -> None:
    while True:
        await asyncio.sleep(IDLE_CHECK_S)
        for session in recorder.book.idle_sessions(timeout_s):
            log.info("dropped idle session %s", session.session_id)
            recorder.record(SessionDropped(session.session_id))


def read_context_tokens(model_path: Path) -> int:
    """The longest sequence that the model's configuration allows.

    Raises:
        RecipeError: The configuration does not say.
    """
    config = msgspec.json.decode((model_path / "config.json").read_bytes())
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        raise RecipeError(
            f"{model_path / 'config.json'} does not say max_position_embeddings",
            key="inference.context_tokens",
            hint="set inference.context_tokens to the longest prompt plus reply",
        )
    return limit


def journal_path(job: ProxyJobConfig, run_secret: str) -> Path:
    """The cell's journal: node-local, apart from those of other runs, readable by its owner.

    Every run directory has a secret of its own, so a run that starts anew at an earlier run's
    path does not take over that one's journal.
    """
    base = job.shards.journal_dir or Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    run = hashlib.blake2b(
        f"{job.run_dir.resolve()}\n{job.cell}\n{run_secret}".encode(), digest_size=8
    )
    folder = base / f"areal_hpc-{run.hexdigest()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise ClusterError(
            f"{folder} belongs to somebody else", key="shards.journal_dir", hint="name a folder"
        )
    return folder / "journal"
