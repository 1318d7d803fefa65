"""Cell of a trial: the real proxy before an engine, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import uvloop

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.launch.trial.engine import RandomReplies, RecordedReplies, StandInEngine
from areal_hpc.launch.trial.start import TrialConfig
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
DRAIN_TIMEOUT_S = 1


@contextlib.contextmanager
def open_trial_cell(config: TrialConfig) -> Iterator[TrialCell]:
    """Proxy and engine while the context lasts.

    They have a thread of their own: an agent that blocks its event loop must not stop them, as in a
    run, where the proxy is another process.

    Raises:
        ArealError: The model or the recorded run is not as it has to be.
    """
    cell = TrialCell(config)
    thread = threading.Thread(target=cell.run_event_loop, name="trial-cell", daemon=True)
    thread.start()
    cell.is_ready.wait()
    if cell.failure is not None:
        raise cell.failure
    try:
        yield cell
    finally:
        cell.stop.request()
        thread.join()


class TrialCell:
    def __init__(self, config: TrialConfig) -> None:
        self._config = config
        self.stop = StopRequest()
        self.is_ready = threading.Event()
        self.failure: BaseException | None = None
        self._recorder: MemoryRecorder | None = None
        self._engine: StandInEngine | None = None

    def get_session(self, session_id: str) -> Session:
        assert self._recorder is not None
        return self._recorder.store.sessions[session_id]

    @property
    def ignored_grammars(self) -> list[str]:
        return sorted(self._engine.ignored_grammars) if self._engine else []

    def run_event_loop(self) -> None:
        try:
            uvloop.run(self._serve_proxy_and_engine())
        except BaseException as error:  # boundary: raised in the thread that waits
            self.failure = error
        finally:
            self.is_ready.set()

    async def _serve_proxy_and_engine(self) -> None:
        job, paths = self._config.proxy, RunPaths(self._config.proxy.run_dir)
        inference = job.recipe.inference
        model = ServedModel.from_model_dir(
            job.recipe.experiment_name,
            job.model_path,
            inference.context_length,
            inference.tool_call_parser,
            inference.reasoning_parser,
        )
        self._recorder = MemoryRecorder(model.encoder.vocab_size)
        name = rendezvous.format_proxy_name(job.cell)
        async with self._open_engine(model) as url:
            service = ProxyService(
                job.proxy_limits,
                model,
                job.serve_python,
                rendezvous.ensure_admin_key(paths.admin_key),
                self._recorder,
                StaticReplicaSource([url]),
                driver_key=derive_bearer_key(
                    rendezvous.ensure_service_key(paths.service_key), name
                ),
            )
            try:
                listener = socket.create_server((LOOPBACK_HOST, 0), backlog=LISTEN_BACKLOG)
                proxy_url = f"http://{LOOPBACK_HOST}:{listener.getsockname()[1]}"
                rendezvous.publish_endpoint(paths.rendezvous_dir, name, proxy_url)
                self.is_ready.set()
                await service.run(listener, self.stop, DRAIN_TIMEOUT_S)
            finally:
                await service.close()

    @contextlib.asynccontextmanager
    async def _open_engine(self, model: ServedModel) -> AsyncIterator[str]:
        if self._config.sglang_url is not None:
            yield self._config.sglang_url
            return
        if not model.end_token_ids:
            raise RecipeError(
                f"{self._config.proxy.model_path} does not say eos_token_id",
                key="model",
                hint="copy generation_config.json of the base model into it",
            )
        end_id, recorded_run = model.end_token_ids[0], self._config.recorded_run
        self._engine = StandInEngine(
            model.encoder,
            end_id,
            RandomReplies(model.encoder, end_id)
            if recorded_run is None
            else RecordedReplies(RunPaths(recorded_run), model.encoder.vocab_size),
        )
        server = ServiceServer(self._engine)
        listener = socket.create_server((LOOPBACK_HOST, 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://{LOOPBACK_HOST}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
