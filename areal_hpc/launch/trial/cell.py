"""Cell of a trial: the real proxy before a stand-in engine, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import uvloop
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.launch.trial.start import TrialConfig
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.router import StaticReplicaSource
from areal_hpc.proxy.service import LISTEN_BACKLOG, ProxyService
from areal_hpc.proxy.sessions.recorder import MemoryRecorder
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.wire.http_server import JsonApp, ServiceServer, read_body

LOOPBACK_HOST = "127.0.0.1"
DRAIN_TIMEOUT_S = 1
MAX_RANDOM_REPLY_TOKENS = 48
"""Longest random reply; a longer one shows nothing more."""
MAX_REQUEST_BYTES = 1 << 28
WEIGHT_VERSION = "default"
"""SGLang's version of weights that nobody gave one."""
GRAMMAR_NAMES = ("json_schema", "regex", "ebnf", "structural_tag")


@contextlib.contextmanager
def open_trial_cell(config: TrialConfig) -> Iterator[TrialCell]:
    """Proxy and engine while the context lasts.

    They have a thread of their own: an agent that blocks its event loop must not stop them, as in a
    run, where the proxy is another process.
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
            uvloop.run(self._serve_cell())
        except BaseException as error:  # boundary: raised in the thread that waits
            self.failure = error
        finally:
            self.is_ready.set()

    async def _serve_cell(self) -> None:
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
        self._engine = StandInEngine(model.encoder, model.end_token_ids[0])
        server = ServiceServer(self._engine)
        listener = socket.create_server((LOOPBACK_HOST, 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://{LOOPBACK_HOST}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


class _SamplingParams(Struct):
    max_new_tokens: int
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class _GenerateRequest(Struct):
    input_ids: list[int]
    sampling_params: _SamplingParams
    rid: str = ""
    stream: bool = False
    top_logprobs_num: int = 0


class StandInEngine(JsonApp):
    """The routes of SGLang that the proxy calls.

    Replies are tokens drawn evenly from those that are text, the same to the same question.
    """

    def __init__(self, encoder: TokenEncoder, end_id: int) -> None:
        super().__init__()
        self._encoder, self._end_id = encoder, end_id
        self._text_ids = encoder.list_plain_text_token_ids()
        self.ignored_grammars: set[str] = set()
        """Names of the grammars that requests asked for; replies do not follow them."""

    async def answer(self, request: Request) -> tuple[int, bytes]:
        match request.method, request.scope["path"]:
            case "GET", "/ready":
                return 200, b"{}"
            case "GET", "/model_info":
                return 200, msgspec.json.encode({"weight_version": WEIGHT_VERSION})
            case "POST", "/abort_request":
                return 200, b"{}"
            case "POST", "/generate":
                body = await read_body(request, MAX_REQUEST_BYTES)
                return 200, self._generate(msgspec.json.decode(body, type=_GenerateRequest))
        raise HTTPException(404, "no such route")

    def _generate(self, request: _GenerateRequest) -> bytes:
        sampling = request.sampling_params
        self.ignored_grammars.update(
            name for name in GRAMMAR_NAMES if getattr(sampling, name) is not None
        )
        rng = random.Random(f"{sampling.sampling_seed or 0}/{len(request.input_ids)}")
        length = rng.randint(1, min(sampling.max_new_tokens, MAX_RANDOM_REPLY_TOKENS))
        ids = rng.choices(self._text_ids, k=length)
        is_ended = length < sampling.max_new_tokens
        ids += [self._end_id] if is_ended else []
        count = len(ids)
        logprobs = [(-math.log(len(self._text_ids)), id_, None) for id_ in ids]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": {"type": "stop", "matched": self._end_id}
            if is_ended
            else {"type": "length", "length": count},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": count,
            "cached_tokens": 0,
            "output_token_logprobs": logprobs,
            "weight_version": WEIGHT_VERSION,
            "weight_versions": [{"version": WEIGHT_VERSION, "start": 0, "end": count}],
        }
        if request.top_logprobs_num:
            meta["output_top_logprobs"] = [[one] for one in logprobs]
        text = self._encoder.decode(ids[:-1] if is_ended else ids, skip_special_tokens=True)
        encoded = msgspec.json.encode({"text": text, "output_ids": ids, "meta_info": meta})
        return b"data: " + encoded + b"\n\ndata: [DONE]\n\n" if request.stream else encoded
