"""Authenticated control proxy in front of a cell's SGLang servers.

SGLang listens on loopback, and requires keys that are new with each start; a caller on the same
node gets them in the list of replicas. The control proxy listens on the advertised host with the
run's certificate, requires a bearer key, and forwards only the routes of `wire.replicas`.
"""

import asyncio
import re
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
from msgspec import structs
from starlette.exceptions import HTTPException
from starlette.requests import Request

from areal_hpc.errors import ControlCallRefusedError
from areal_hpc.inference.replica import ControlCallerIdentity, Replica
from areal_hpc.inference.server.sglang_server import SGLangServer
from areal_hpc.rundir.rendezvous import (
    derive_bearer_key,
    format_control_proxy_name,
    make_server_tls,
)
from areal_hpc.wire.http import build_key_header
from areal_hpc.wire.http_server import JsonApp, ServiceServer, read_message
from areal_hpc.wire.replicas import (
    FORWARDED_ROUTES,
    INCARNATION_HEADER,
    NO_KEYS,
    SENDER_TIMEOUT_HEADER,
    TRAINER_GENERATION_HEADER,
    FenceReplicaRequest,
    FollowerPollRequest,
    LoadWeightsRequest,
    ReopenReplicaRequest,
    ReplicasOfCell,
    ReplicaView,
    ScorePromptRequest,
)

_READ_ONLY_ROUTES = ("model_info",)
"""Routes for GET requests."""
_API_KEY_ROUTES = (*_READ_ONLY_ROUTES, "generate")
"""Routes for which SGLang accepts the API key; all others require the admin key."""
_WEIGHTS_FOLDER_PATTERN = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
"""Generation, step, serial number (`weights/disk.py`)."""
_DEFAULT_SENDER_TIMEOUT_S, _MAX_SENDER_TIMEOUT_S = 300.0, 1e9
_ORPHANED_CALL_GRACE_S = 5.0
"""Time that a call may continue after its caller disconnected."""
_STOP_TIMEOUT_S = 10.0
_SGLANG_KEEP_ALIVE_S = 3.0
"""Maximum idle time of a reused connection to SGLang, which closes it after 5 s."""


class ControlProxyApp(JsonApp):
    """ASGI application of the control proxy. Replicas load weights only from `weights_dir`."""

    def __init__(
        self, cell: str, replicas: Sequence[Replica], service_key: str, weights_dir: Path
    ) -> None:
        self._cell = cell
        self._replicas = replicas
        super().__init__(derive_bearer_key(service_key, format_control_proxy_name(cell)))
        self._weights_dir = weights_dir
        self._upstream: aiohttp.ClientSession | None = None

    def build_error_reply(self, request: Request, error: Exception) -> tuple[int, str]:
        if isinstance(error, ControlCallRefusedError):
            return 409, str(error)
        return super().build_error_reply(request, error)

    async def answer(self, request: Request) -> tuple[int, bytes]:
        """Change a replica's state, or forward the request to SGLang."""
        match request.method, request.scope["path"].strip("/").split("/"):
            case "GET", ["replicas"]:
                return _encode_reply(ReplicasOfCell(self._cell, self._list_views(request)))
            case "POST", ["follow"]:
                poll = await read_message(request, FollowerPollRequest)
                replica = self._replicas[0]
                try:
                    return _encode_reply(replica.nodes.answer_node_poll(poll, replica.clock.now()))
                except ValueError as error:
                    raise HTTPException(400, str(error)) from error
            case "POST", ["replicas", index, "fence"]:
                fence = await read_message(request, FenceReplicaRequest)
                return _encode_reply(
                    self._find_replica(index).stop_serving(_parse_caller_headers(request), fence)
                )
            case "POST", ["replicas", index, "serve"]:
                serve = await read_message(request, ReopenReplicaRequest)
                return _encode_reply(
                    self._find_replica(index).start_serving(_parse_caller_headers(request), serve)
                )
            case "POST", ["replicas", index, "load"]:
                load = self._build_load_weights_body(
                    await read_message(request, LoadWeightsRequest)
                )
                route = "update_weights_from_disk"
                return await self._forward_call(self._find_replica(index), route, request, load)
            case "POST", ["replicas", index, "score"]:
                replica = self._find_replica(index)
                prompt = await read_message(request, ScorePromptRequest)
                body = replica.build_scoring_body(prompt.input_ids)
                return await self._forward_call(replica, "generate", request, body)
            case "POST", ["replicas", index, route] if route in FORWARDED_ROUTES:
                body = msgspec.json.encode(await read_message(request, dict[str, object]))
                return await self._forward_call(self._find_replica(index), route, request, body)
        raise HTTPException(404, "no such route")

    def _list_views(self, request: Request) -> list[ReplicaView]:
        views = [replica.build_view() for replica in self._replicas]
        client, server = request.scope["client"], request.scope["server"]
        if client and server and client[0] == server[0]:
            return views
        return [structs.replace(view, keys=NO_KEYS) for view in views]

    def _find_replica(self, index: str) -> Replica:
        if not index.isdecimal() or int(index) >= len(self._replicas):
            raise HTTPException(404, "no such replica")
        return self._replicas[int(index)]

    def _build_load_weights_body(self, request: LoadWeightsRequest) -> bytes:
        folder = self._weights_dir / request.folder
        if not _WEIGHTS_FOLDER_PATTERN.fullmatch(request.folder) or not folder.is_dir():
            raise HTTPException(400, f"no folder {request.folder!r} in {self._weights_dir}")
        return msgspec.json.encode(
            {
                "model_path": str(folder),
                "load_format": "safetensors",
                "flush_cache": False,  # another call flushes it
                "weight_version": request.version,
            }
        )

    async def _forward_call(
        self, replica: Replica, route: str, request: Request, body: bytes
    ) -> tuple[int, bytes]:
        caller = _parse_caller_headers(request)
        server = replica.begin_control_call(caller, route)
        accepted: bool | None = False
        try:
            status, content = await self._call_sglang(server, route, body, caller, request)
            accepted = status < 400
        except TimeoutError:
            accepted = None
            raise HTTPException(504, f"SGLang did not respond to {route}") from None
        except aiohttp.ClientError as error:
            raise HTTPException(502, f"SGLang is not reachable: {error}") from error
        finally:
            replica.finish_control_call(caller, route, accepted)
        return status, content

    async def _call_sglang(
        self,
        server: SGLangServer,
        route: str,
        body: bytes,
        caller: ControlCallerIdentity,
        request: Request,
    ) -> tuple[int, bytes]:

        async def forward() -> tuple[int, bytes]:
            is_read = route in _READ_ONLY_ROUTES
            keys = server.keys
            key = keys.api if route in _API_KEY_ROUTES else keys.admin
            headers = {"content-type": "application/json"} | build_key_header(key)
            method, data = ("GET", None) if is_read else ("POST", body)
            call = self._get_http_session().request(
                method, f"{server.url}/{route}", data=data, headers=headers
            )
            async with call as response:
                return response.status, await response.read()

        answered = asyncio.ensure_future(forward())
        disconnected = asyncio.ensure_future(request.receive())
        try:
            async with asyncio.timeout(caller.sender_timeout_s) as limit:
                await asyncio.wait((answered, disconnected), return_when=asyncio.FIRST_COMPLETED)
                if not answered.done():
                    limit.reschedule(asyncio.get_running_loop().time() + _ORPHANED_CALL_GRACE_S)
                return await answered
        finally:
            answered.cancel()
            disconnected.cancel()

    def _get_http_session(self) -> aiohttp.ClientSession:
        if self._upstream is None:
            # Each call has its own time limit.
            self._upstream = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(keepalive_timeout=_SGLANG_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._upstream

    async def close(self) -> None:
        if self._upstream is not None:
            await self._upstream.close()


def _encode_reply(reply: msgspec.Struct) -> tuple[int, bytes]:
    return 200, msgspec.json.encode(reply)


def _parse_caller_headers(request: Request) -> ControlCallerIdentity:
    headers = request.headers
    try:
        caller = ControlCallerIdentity(
            server_incarnation=int(headers[INCARNATION_HEADER]),
            trainer_generation=int(headers[TRAINER_GENERATION_HEADER]),
            sender_timeout_s=float(headers.get(SENDER_TIMEOUT_HEADER, _DEFAULT_SENDER_TIMEOUT_S)),
        )
    except (KeyError, ValueError) as error:
        raise HTTPException(400, f"the caller's headers must be numbers: {error}") from None
    if not 0 < caller.sender_timeout_s <= _MAX_SENDER_TIMEOUT_S:
        raise HTTPException(
            400, f"{SENDER_TIMEOUT_HEADER} must be above 0 and at most {_MAX_SENDER_TIMEOUT_S:.0f}"
        )
    return caller


class ControlProxyServer:
    """Server of the control proxy, in its own thread: the main thread watches processes."""

    def __init__(self, app: ControlProxyApp, host: str, service_key_file: Path) -> None:
        self._app = app
        # The protocol is explicit because asyncio turns off Nagle's algorithm only then; with it
        # every response would wait 40 ms for a delayed acknowledgment.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind((host, 0))
        self._socket.listen()  # from now on callers wait, and none is refused
        self.url = f"https://{host}:{self._socket.getsockname()[1]}"
        self._server = ServiceServer(app, make_server_tls(service_key_file))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve_then_close_app()),
            name="control-proxy",
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    async def _serve_then_close_app(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            await self._app.close()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_STOP_TIMEOUT_S)
        self._socket.close()
