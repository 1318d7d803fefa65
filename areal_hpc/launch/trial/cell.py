"""Cell of a trial: the real proxy before an engine, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from types import TracebackType

import aiohttp
import uvloop

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.launch.trial.config import TrialConfig
from areal_hpc.launch.trial.replies import (
    CompletionsServerReplies,
    RandomReplies,
    RecordedReplies,
    ReplySource,
)
from areal_hpc.launch.trial.stand_in_engine import StandInEngine
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.router import StaticReplicaSource
from areal_hpc.proxy.service import LISTEN_BACKLOG, ProxyService
from areal_hpc.proxy.sessions.recorder import MemoryRecorder
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.asgi import ServiceServer
from areal_hpc.wire.service_key import derive_bearer_key

LOOPBACK_HOST = "127.0.0.1"
PROBE_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 1


class TrialCell:
    """Proxy and engine while the context lasts.

    They have a thread of their own: an agent that blocks its event loop must not stop them, as in a
    run, where the proxy is another process.

    Raises:
        ArealError: On entering: the model, the recorded run or the server is not as it has to be.
    """

    def __init__(self, config: TrialConfig) -> None:
        self._config = config
        self._stop = StopRequest()
        self._is_ready = threading.Event()
        self._failure: BaseException | None = None
        self._recorder: MemoryRecorder | None = None
        self._engine: StandInEngine | None = None
        self._thread = threading.Thread(target=self._run_event_loop, name="trial-cell", daemon=True)

    def __enter__(self) -> TrialCell:
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.request()
        self._thread.join()

    def get_session(self, session_id: str) -> Session:
        assert self._recorder is not None
        return self._recorder.store.sessions[session_id]

    @property
    def ignored_grammars(self) -> list[str]:
        return sorted(self._engine.ignored_grammars) if self._engine else []

    def _run_event_loop(self) -> None:
        try:
            uvloop.run(self._serve_proxy_and_engine())
        except BaseException as error:  # boundary: told in the thread that waits
            self._failure = error
        finally:
            self._is_ready.set()

    async def _serve_proxy_and_engine(self) -> None:
        job, paths = self._config.proxy, RunPaths(self._config.proxy.run_dir)
        model = ServedModel.from_model_dir(
            job.model_name,
            job.model_path,
            job.context_tokens,
            job.tool_call_parser,
            job.reasoning_parser,
        )
        self._recorder = recorder = MemoryRecorder(model.encoder.vocab_size)
        async with self._open_engine(model) as url:
            service = ProxyService(
                job.proxy,
                model,
                job.serve_python,
                rendezvous.ensure_admin_key(paths.admin_key),
                recorder,
                StaticReplicaSource([url]),
                driver_key=derive_bearer_key(
                    rendezvous.ensure_service_key(paths.service_key),
                    rendezvous.format_proxy_name(job.cell),
                ),
            )
            try:
                listener = socket.create_server((LOOPBACK_HOST, 0), backlog=LISTEN_BACKLOG)
                name = rendezvous.format_proxy_name(job.cell)
                proxy_url = f"http://{LOOPBACK_HOST}:{listener.getsockname()[1]}"
                rendezvous.publish_endpoint(paths.rendezvous_dir, name, proxy_url)
                self._is_ready.set()
                await service.run(listener, self._stop, DRAIN_TIMEOUT_S)
            finally:
                await service.close()

    @contextlib.asynccontextmanager
    async def _open_engine(self, model: ServedModel) -> AsyncIterator[str]:
        base_url = self._config.base_url
        if base_url is not None and await _has_sglang_routes(base_url):
            yield base_url.removesuffix("/v1")
            return
        if not model.end_token_ids:
            raise RecipeError(
                f"{self._config.proxy.model_path} does not say eos_token_id",
                key="model",
                hint="copy generation_config.json of the base model into it",
            )
        end_id = model.end_token_ids[0]
        replies: ReplySource
        if base_url is not None:
            replies = CompletionsServerReplies(base_url, model.encoder, end_id)
        elif self._config.recorded_run is not None:
            run = RunPaths(self._config.recorded_run)
            replies = RecordedReplies(run, model.encoder.vocab_size)
        else:
            replies = RandomReplies(model.encoder, end_id)
        self._engine = StandInEngine(model.encoder, end_id, replies)
        server = ServiceServer(self._engine)
        listener = socket.create_server((LOOPBACK_HOST, 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://{LOOPBACK_HOST}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
            await replies.close()


async def _has_sglang_routes(base_url: str) -> bool:
    """Whether the server at an address has SGLang's routes; false if it has OpenAI's alone.

    Raises:
        ClusterError: Nobody answers there.
    """
    url = f"{base_url.removesuffix('/v1')}/model_info"
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError) as error:
        raise ClusterError(
            f"no server answers at {base_url} ({type(error).__name__}: {error})",
            key="--base-url",
            hint="start it first, or leave --base-url out for random replies",
        ) from error
