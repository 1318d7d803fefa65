"""Stand-ins around a real proxy: an SGLang with the test's replies, a relay, a ledger.

The payloads are those of SGLang 0.5.23; `tests/integration/proxy` checks them against the
real one.
"""

import asyncio
import base64
import ssl
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web
from tokenizers import Tokenizer

from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key, make_server_tls
from areal_hpc.shards.index import read_sealed_tickets
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropTicketRequest,
    SealedTicket,
    SettleShardsRequest,
)
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaState, ReplicaView
from areal_hpc.wire.trajectory import MixtureShape
from tests.support.deadlines import scaled

CELL = "cell-0"
Result = TypeVar("Result")


@dataclass
class Script:
    text: str = "hello world"
    finish: str = "eos"
    """`eos`, `length` or `stop:<string>`."""
    versions: list[tuple[str, int, int]] | None = None
    delay_s: float = 0.0
    output_ids: list[int] | None = None
    """Tokens in place of the canonical encoding of `text`."""
    fault: str = ""
    """Fault of the answer: `hang_up`, `500`, `400`, `garbage`, `abort`, `late_hang_up:<pieces>`."""
    piece_tokens: int = 1
    """Tokens in each piece of a stream."""
    piece_delay_s: float = 0.0
    gate: threading.Event | None = None
    """Event until which nothing is sent, or nothing after the first piece of a stream."""


TALKATIVE = Script("word " * 1000, piece_delay_s=0.02)
"""Script of a long stream: a caller who hangs up does so long before its end."""
MUCH_CHARS = 1000
"""Bound on the text before a hang-up arrives, even on a machine that stops for seconds."""


@dataclass
class ScriptedSGLang:
    """One SGLang server. Requests it saw are in `requests`, aborts in `aborted`."""

    tokenizer: Tokenizer
    script: Callable[[dict[str, Any]], Script] = lambda request: Script()
    version: str = "1.0"
    incremental: bool = False
    """Pieces of a stream hold only what is new (`--incremental-streaming-output`)."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    mixture: MixtureShape | None = None
    """Shape of the experts that it returns to requests that ask for them."""
    keys: list[str] = field(default_factory=list)
    """The authorization of each request, if it had one."""
    url: str = ""
    _runner: web.AppRunner | None = None
    _has_stopped: bool = False

    def build_app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/model_info", self._info)
        return app

    async def start(self, port: int = 0) -> None:
        self._runner, self.url = await start_web_app(self.build_app(), port)
        self._has_stopped = False

    async def stop(self) -> None:
        assert self._runner is not None
        self._has_stopped = True
        await self._runner.cleanup()

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "tiny", "weight_version": self.version})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        body.setdefault("rid", "0")
        self.requests.append(body)
        if key := request.headers.get("authorization"):
            self.keys.append(key)
        script = self.script(body)
        await asyncio.sleep(script.delay_s)
        match script.fault:
            case "hang_up":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case "500" | "400" as status:
                message = "boom" if status == "500" else "too warm"
                return web.json_response({"error": {"message": message}}, status=int(status))
            case "garbage":
                return web.Response(text="<html>")
        if body.get("stream"):
            return await self._stream(request, body, script)
        await self._opened(script.gate)
        return web.json_response(self._payload(body, script))

    async def _stream(
        self, request: web.Request, body: dict[str, Any], script: Script
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        whole = self._payload(body, script)
        for count, piece in enumerate(self.pieces(body, script), start=1):
            if body["rid"] in self.aborted:
                piece = self._cut(whole, piece)
            await response.write(b"data: " + msgspec.json.encode(piece) + b"\n\n")
            if script.fault == f"late_hang_up:{count}":
                assert request.transport is not None
                await asyncio.sleep(0.05)  # so that what was written leaves
                request.transport.abort()
                return response
            if piece["meta_info"]["finish_reason"] is not None:
                break
            await asyncio.sleep(script.piece_delay_s)
            await self._opened(script.gate)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _opened(self, gate: threading.Event | None) -> None:
        while gate is not None and not gate.is_set() and not self._has_stopped:
            await asyncio.sleep(0.005)

    def pieces(self, body: dict[str, Any], script: Script) -> Iterator[dict[str, Any]]:
        """The events of a stream, as SGLang writes them."""
        whole = self._payload(body, script)
        ids, meta = whole["output_ids"], whole["meta_info"]
        before, text_before = 0, ""
        while before < len(ids):
            end = min(before + script.piece_tokens, len(ids))
            last = end == len(ids)
            text = whole["text"] if last else self.tokenizer.decode(ids[:end]).rstrip("\ufffd")
            start = before if self.incremental else 0
            piece_meta = {**meta, "completion_tokens": end}
            for name in (
                *("output_token_logprobs", "output_top_logprobs"),
                *("output_token_sampling_mask", "output_token_sampling_logprobs"),
            ):
                if name in meta:
                    piece_meta[name] = meta[name][start:end]
            if not last:
                piece_meta.pop("routed_experts", None)
                piece_meta["finish_reason"] = None
                del piece_meta["weight_versions"]
            shown = text[len(text_before) :] if self.incremental else text
            yield {"text": shown, "output_ids": ids[start:end], "meta_info": piece_meta}
            before, text_before = end, text

    def _cut(self, whole: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
        """The last event of a generation that was aborted here."""
        count = piece["meta_info"]["completion_tokens"]
        reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        versions = [{"version": self.version, "start": 0, "end": count}]
        meta = {**piece["meta_info"], "finish_reason": reason, "weight_versions": versions}
        return {**piece, "meta_info": meta}

    def _payload(self, body: dict[str, Any], script: Script) -> dict[str, Any]:
        ids = script.output_ids
        if ids is None:
            ids = list(self.tokenizer.encode(script.text, add_special_tokens=False).ids)
        text = script.text
        reason: dict[str, Any] = {"type": "length", "length": len(ids)}
        if script.finish == "eos":
            eos = self.tokenizer.token_to_id("<|im_end|>")
            assert eos is not None
            ids = [*ids, eos]
            reason = {"type": "stop", "matched": eos}
        elif script.finish.startswith("stop:"):
            stop = script.finish.removeprefix("stop:")
            text = text[: text.index(stop)]
            reason = {"type": "stop", "matched": stop}
        if script.fault == "abort":
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        versions = script.versions or [(self.version, 0, len(ids))]
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": versions[-1][0],
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5 - 0.001 * i, t, None] for i, t in enumerate(ids)],
            "output_token_logprobs_length": len(ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": [
                {"version": version, "start": start, "end": end} for version, start, end in versions
            ],
        }
        if count := body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [
                [[-0.5 - 0.1 * j, (t + j) % 300, None] for j in range(count)] for t in ids
            ]
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[t, (t + 1) % 300] for t in ids]
            meta["output_token_sampling_logprobs"] = [-0.25 - 0.001 * i for i in range(len(ids))]
            meta["output_token_sampling_mask_length"] = len(ids)
        if self.mixture is not None and body.get("return_routed_experts"):
            tokens = [*body["input_ids"], *ids]
            first = body["routed_experts_start_len"]
            routes = make_routes(tokens[:-1], self.mixture)[first:]
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return {"text": text, "output_ids": ids, "meta_info": meta}


def make_routes(token_ids: list[int], mixture: MixtureShape) -> npt.NDArray[np.uint8]:
    """Compute experts of tokens [t, layer, k], by their ids and positions."""
    positions = np.arange(len(token_ids)) + np.array(token_ids)
    layers, numbers = np.arange(mixture.layers)[:, None], np.arange(mixture.per_token)
    routes: npt.NDArray[np.int64] = (
        positions[:, None, None] + 3 * layers + numbers
    ) % mixture.experts
    return routes.astype(np.uint8)


class StandIn:
    """An endpoint of a run: published while it is there."""

    endpoint: str
    _runner: web.AppRunner

    def __init__(self, directory: Path, service_key: str) -> None:
        self._directory = directory
        self._authorization = f"Bearer {derive_bearer_key(service_key, self.endpoint)}"
        self._service_key = service_key

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(self.routes())
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as key_file:
            key_file.write(self._service_key)
            key_file.flush()
            tls = make_server_tls(Path(key_file.name))
        self._runner, url = await start_web_app(app, tls=tls)
        rendezvous.publish_endpoint(self._directory, self.endpoint, url)

    def require_key(self, request: web.Request) -> None:
        assert request.headers["authorization"] == self._authorization

    async def stop(self) -> None:
        await self._runner.cleanup()


class StandInRelay(StandIn):
    """Answers GET /replicas for the cell."""

    endpoint = f"control-{CELL}"

    def __init__(self, directory: Path, service_key: str) -> None:
        super().__init__(directory, service_key)
        self.replicas: list[ReplicaView] = []
        self.polls = 0

    def show(self, *urls: str, state: ReplicaState = "serving") -> None:
        self.replicas = [ReplicaView(index, 1, state, url, "1.0") for index, url in enumerate(urls)]

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/replicas", self._list)]

    async def _list(self, request: web.Request) -> web.Response:
        self.polls += 1
        self.require_key(request)
        return web.Response(body=msgspec.json.encode(ReplicasOfCell(CELL, self.replicas)))


class StandInLedger(StandIn):
    """Ledger that acknowledges settled tickets; with `away` it refuses as one that restarts."""

    endpoint = "ledger"

    def __init__(self, directory: Path, service_key: str) -> None:
        super().__init__(directory, service_key)
        self.settled: list[SealedTicket] = []
        self.dropped: list[DropTicketRequest] = []
        self.away = False

    def routes(self) -> list[web.RouteDef]:
        return [web.post(route, self._acknowledge) for route in ("/settle", "/drop")]

    async def _acknowledge(self, request: web.Request) -> web.Response:
        if self.away:
            return web.Response(status=503)
        self.require_key(request)
        body = await request.read()
        if request.path == "/settle":
            shards = msgspec.json.decode(body, type=SettleShardsRequest).shards
            tickets = read_sealed_tickets(RunPaths(self._directory.parent).shard_index_dir)
            self.settled += [ticket for ticket in tickets if ticket.shard in shards]
        else:
            self.dropped.append(msgspec.json.decode(body, type=DropTicketRequest))
        return web.Response(body=msgspec.json.encode(Acknowledged()))


class LoopThread:
    """An event loop of its own, so that stand-ins answer while the test blocks."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result] | Awaitable[Result]) -> Result:
        async def awaited() -> Result:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(scaled(30))

    def stop(self) -> None:
        self.run(self._abort_connections())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _abort_connections(self) -> None:
        """End connections whose clients have not answered the end of TLS."""
        transports: Any = getattr(self.loop, "_transports", {})
        for transport in list(transports.values()):
            transport.abort()
        await asyncio.sleep(0)


async def start_web_app(
    app: web.Application, port: int = 0, tls: ssl.SSLContext | None = None
) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    return runner, f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
