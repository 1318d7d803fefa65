"""Composition of the proxy's application, and the loop that serves it until a stop."""

import asyncio
import gc
import logging
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.proxy.completion.service import CompletionService
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.limits import GrammarChecks
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.router import ReplicaSource, Router
from areal_hpc.proxy.engine.sglang_client import SGLangClient
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient
from areal_hpc.proxy.http.app import ProxyApp
from areal_hpc.proxy.http.driver_api import DriverApi
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.sealing import TicketSealer
from areal_hpc.proxy.sessions.store import SessionDropped
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.wire.http_server import GuardedServer, get_connection_descriptor_limit

log = logging.getLogger(__name__)

STOP_POLL_S = 0.05
LISTEN_BACKLOG = 2048
IDLE_CHECK_S = 5.0
GC_THRESHOLD = 50_000
"""New objects after which the garbage collector runs. One reply makes hundreds."""


class ProxyService:
    """Application of the proxy with its router, parsers and sealer. Make it in the event loop."""

    def __init__(
        self,
        limits: ProxyLimits,
        model: ServedModel,
        serve_python: str,
        admin_key: str,
        recorder: JournaledRecorder,
        replica_source: ReplicaSource,
        sealer: TicketSealer | None = None,
        *,
        driver_key: str = "",
        metrics_key: str = "",
        online: bool = False,
        trains_people: bool = False,
    ) -> None:
        if limits.message_normalizer is not None:
            key = "proxy.message_normalizer"
            model = replace(model, normalize=load_user_function(limits.message_normalizer, key))
        disable_created_metrics()  # type: ignore[no-untyped-call]
        # A call takes two descriptors: of the connections to its client and to SGLang.
        most_calls = min(limits.max_concurrent_calls, get_connection_descriptor_limit() // 2)
        limits = limits.model_copy(update={"max_concurrent_calls": most_calls})
        self._limits = limits
        self._recorder = recorder
        self._router = Router(replica_source)
        self._upstream = SGLangClient()
        self._sealer = sealer
        self._parsers = ParserProcessClient(
            serve_python, model.tool_call_parser, model.reasoning_parser, model.model_dir
        )
        self._must_parse = bool(model.tool_call_parser or model.reasoning_parser)
        completions = CompletionService(
            model,
            self._router,
            self._upstream,
            recorder,
            limits,
            self._parsers if self._must_parse else None,
            GrammarChecks(
                self._parsers if serve_python else None,
                limits.request_timeout_s,
                is_required=sealer is not None,
            ),
        )
        self.metrics = completions.metrics
        self._app = ProxyApp(
            admin_key=admin_key,
            metrics_key=metrics_key,
            driver_key=driver_key,
            limits=limits,
            model=model,
            store=recorder.store,
            completions=completions,
            driver_api=DriverApi(
                recorder,
                self._router,
                sealer,
                limits,
                online=online,
                trains_people=trains_people,
            ),
        )

    async def run(self, listener: socket.socket, stop: StopRequest, drain_timeout_s: int) -> None:
        """Serve until a stop signal; then finish open calls within `drain_timeout_s`."""
        # Drop uvicorn's advice to install a WebSocket library: the routes refuse WebSockets.
        logging.getLogger("uvicorn.error").addFilter(
            lambda record: "WebSocket library" not in str(record.msg)
        )
        server = GuardedServer(
            self._app,
            get_connection_descriptor_limit() - self._limits.max_concurrent_calls,
            loop="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=drain_timeout_s,
        )
        services = [
            server.serve(sockets=[listener]),
            self._watch_for_end(server, stop),
            self._router.poll_replicas(),
            self._drop_idle_sessions(),
            *([self._sealer.run()] if self._sealer is not None else ()),
            *([self._parsers.run()] if self._must_parse else ()),
        ]
        tasks = [asyncio.ensure_future(service) for service in services]
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in done:
            task.result()

    async def _watch_for_end(self, server: uvicorn.Server, stop: StopRequest) -> None:
        while not stop.requested:
            if self._recorder.failure is not None:
                raise self._recorder.failure
            await asyncio.sleep(STOP_POLL_S)
        server.should_exit = True
        await asyncio.Event().wait()  # the server's own end ends the service

    async def _drop_idle_sessions(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            for session in self._recorder.store.list_droppable_sessions(
                self._limits.session_timeout_s
            ):
                # An ended session that was exported, or is never exported, is dropped silently.
                if not session.ended or (session.must_persist and not session.is_exported):
                    log.info("dropped idle session %s", session.session_id)
                self._recorder.record(SessionDropped(session.session_id))
            if self._sealer is None:  # a sealer does this after it has settled tickets
                await self._recorder.compact_grown_journal()

    async def close(self) -> None:
        await self._parsers.close()
        await self._router.close()
        await self._upstream.close()
        if self._sealer is not None:
            await self._sealer.close()
        self._recorder.close()


def run_in_uvloop_thread(serve: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end with uvloop, in a thread of its own.

    In the main thread uvloop would claim the wake-up descriptor, by which StopRequest gets signals.
    """
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    with ThreadPoolExecutor(1, thread_name_prefix="proxy-loop") as loop_thread:
        loop_thread.submit(uvloop.run, serve).result()
