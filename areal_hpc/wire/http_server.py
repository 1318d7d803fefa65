"""HTTP server of the run's services: uvicorn with limits, and the base class of their applications.

uvicorn alone waits for the rest of a request without a limit, accepts headers of any length, and
accepts connections until the process has no descriptor left for anything else.

Starlette reads the requests and writes the responses. Its routing and its error middleware are not
used: the middleware raises a handled exception again, and then uvicorn closes the connection.
"""

import asyncio
import hmac
import logging
import resource
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from areal_hpc.wire.decoding import decode_json
from areal_hpc.wire.http import SERVER_KEEP_ALIVE_S

log = logging.getLogger(__name__)
MessageT = TypeVar("MessageT")

REQUEST_HEAD_TIMEOUT_S = 20.0
"""Time from the first byte of a request, or from the connection, to the end of the headers. A TLS
handshake may take as long."""
REQUEST_RECEIVE_TIMEOUT_S = 120.0
"""Time from the same moment to the end of the body."""
MAX_HEAD_BYTES = 64 * 1024
TLS_SHUTDOWN_TIMEOUT_S = 2.0
"""Time that a closed connection waits for its client to close."""
TICKS_PER_DEADLINE_CHECK = 10
"""Number of uvicorn's ticks, which are 0.1 s apart, from one check to the next."""
RESERVED_DESCRIPTORS = 128
"""File descriptors for everything but connections: files, pipes, the event loop."""
MIN_CONNECTIONS = 16
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""More than any message between roles takes."""
CONNECTION_KEY = "areal_hpc.connection"
"""Key of the ASGI scope of a request under which its `GuardedProtocol` is."""


def get_connection_descriptor_limit() -> int:
    """Return the number of descriptors that this process may use for connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return max(soft - RESERVED_DESCRIPTORS, 2 * MIN_CONNECTIONS)


class GuardedProtocol(HttpToolsProtocol):
    """Connection of one client, with deadlines and limits for its requests."""

    _awaits = "head"
    """Part of a request that is being received: `head`, `body`, or nothing."""
    _awaits_since = 0.0
    _head_bytes = 0
    _has_requested = False
    _is_overdue = False
    has_disconnected = False
    on_disconnect: Callable[[], object] | None = None
    """Callback when the client hangs up. A task that waits for that would cost each call 30 us."""

    def __init__(self, *, max_connections: int, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_part_deadline("head")
        if len(self.connections) > self._max_connections and not self._drop_silent_connection():
            self.refuse_connection(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.has_disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()

    def _drop_silent_connection(self) -> bool:
        """Close the oldest connection that never sent a request; return whether there was one."""
        silent = [
            peer
            for peer in self.connections
            if isinstance(peer, GuardedProtocol) and not peer._has_requested and peer is not self
        ]
        if not silent:
            return False
        oldest = min(silent, key=lambda peer: peer._awaits_since)
        self.connections.discard(oldest)  # uvicorn does so too, a moment later
        oldest.transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        if not self._awaits:
            self._start_part_deadline("head")
        super().data_received(data)
        if self._awaits == "head":
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.refuse_connection(431, f"the headers exceed {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        if self._awaits != "head":  # one read may hold several requests
            self._start_part_deadline("head")
        super().on_message_begin()
        scope: Any = self.scope
        scope[CONNECTION_KEY] = self

    def on_headers_complete(self) -> None:
        self._awaits = "body"
        super().on_headers_complete()
        self._has_requested = True

    def on_message_complete(self) -> None:
        self._awaits = ""
        super().on_message_complete()

    def _start_part_deadline(self, request_part: str) -> None:
        self._awaits, self._awaits_since, self._head_bytes = request_part, self.loop.time(), 0
        self._is_overdue = False

    @property
    def _is_answering(self) -> bool:
        """Whether the last request lacks its response. `cycle` is set by the first request."""
        return self._has_requested and not self.cycle.response_complete

    def enforce_deadline(self, now: float) -> None:
        """Hang up if the client is late at two checks: a stalled server reads late itself."""
        if not self._awaits:
            return
        if self._awaits == "head" and self._is_answering:
            return  # the client waits for a response, and has begun to send the next request
        limit_s = REQUEST_HEAD_TIMEOUT_S if self._awaits == "head" else REQUEST_RECEIVE_TIMEOUT_S
        if now - self._awaits_since < limit_s:
            return
        if self._is_overdue and not self.transport.is_closing():
            self.refuse_connection(
                408, f"the request's {self._awaits} did not come within {limit_s:.0f} s"
            )
        self._is_overdue = True

    def refuse_connection(self, status_code: int, message: str) -> None:
        if not (self._is_answering and self.cycle.response_started):
            head = (
                f"HTTP/1.1 {status_code} Refused\r\ncontent-type: text/plain\r\nretry-after: 1\r\n"
            )
            head += f"content-length: {len(message)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + message.encode())
        self.transport.close()

    def shutdown(self) -> None:
        """Hang up at once, or after the response that is being sent."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.transport.abort()  # an idle client would not reply to the end of TLS


class GuardedServer(uvicorn.Server):
    """uvicorn server with deadlines and a limit on connections."""

    def __init__(
        self, app: Any, max_connections: int, tls: ssl.SSLContext | None = None, **options: Any
    ) -> None:
        protocol: Any = partial(GuardedProtocol, max_connections=max_connections)
        options = {
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            # Longer than clients keep a connection: closing one while a client sends a request on
            # it would lose a call, such as one of an update of weights.
            "timeout_keep_alive": SERVER_KEEP_ALIVE_S,
            "backlog": 2048,
        } | options
        super().__init__(uvicorn.Config(app, http=protocol, **options))
        self._max_connections = max_connections
        self._tls = tls
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[bool], socket.socket] = {}
        """TLS handshakes, the oldest first."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections here: uvicorn would neither count nor limit TLS handshakes."""
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        for listener in sockets or ():
            listener.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listener, self._tls)))

    async def _accept(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(1)
                continue
            handshake = loop.create_task(self._shake_hands(connection, tls))
            self._handshakes[handshake] = connection
            handshake.add_done_callback(self._end_handshake)
            used = len(self._handshakes) + len(self.server_state.connections)
            if used > self._max_connections and len(self._handshakes) > 1:
                oldest = next(iter(self._handshakes))
                oldest.cancel()
                await asyncio.wait([oldest])

    async def _shake_hands(self, connection: socket.socket, tls: ssl.SSLContext) -> bool:
        loop = asyncio.get_running_loop()
        create_protocol = partial(
            self.config.http_protocol_class,
            config=self.config,  # type: ignore[call-arg]
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        try:
            await loop.connect_accepted_socket(
                create_protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=REQUEST_HEAD_TIMEOUT_S,
                ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S,
            )
        except OSError:  # the client speaks no TLS, does not trust the certificate, or is too slow
            return False
        return True

    def _end_handshake(self, handshake: asyncio.Task[bool]) -> None:
        connection = self._handshakes.pop(handshake)
        error = None if handshake.cancelled() else handshake.exception()
        if error is not None:
            log.error("a TLS handshake failed", exc_info=error)
        if handshake.cancelled() or error is not None or not handshake.result():
            connection.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        waiting: list[asyncio.Task[Any]] = [*self._accepting, *self._handshakes]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_DEADLINE_CHECK == 0:
            now = asyncio.get_running_loop().time()
            for connection in [*self.server_state.connections]:
                if isinstance(connection, GuardedProtocol):
                    connection.enforce_deadline(now)
        return await super().on_tick(counter)


class ServiceServer(GuardedServer):
    """HTTP server of one application. Its owner stops it with `should_exit`; signals do not."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(app, get_connection_descriptor_limit(), tls, timeout_graceful_shutdown=1)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ByteBudget:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    def try_reserve(self, count: int) -> bool:
        """Return whether `count` more bytes are within the limit; if so, hold them."""
        if self._held_bytes + count > self._max_bytes:
            return False
        self._held_bytes += count
        return True

    def release(self, count: int) -> None:
        self._held_bytes -= count


async def read_body(request: Request, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Read the body of a request, or nothing of it if its declared length is too large.

    Raises:
        HTTPException: 413.
        ClientDisconnect: The client left before it had sent all.
    """
    too_large = HTTPException(413, f"a body holds at most {max_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def read_message(request: Request, message_type: type[MessageT]) -> MessageT:
    """Read the JSON of a request.

    Raises:
        HTTPException: 413; or 400: not a `message_type`, not UTF-8, or too deeply nested.
        ClientDisconnect: The client left before it had sent all.
    """
    body = await read_body(request)
    try:
        return decode_json(body, message_type)
    except RecursionError:
        raise HTTPException(400, "the JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"expected {message_type.__name__} as JSON: {error}") from error


class JsonApp(ABC):
    """ASGI application that responds with JSON, and to errors with `{"error": "..."}`.

    If there is a `bearer_key`, nothing is read of a request without it.
    """

    def __init__(self, bearer_key: str = "") -> None:
        self._authorization = f"Bearer {bearer_key}".encode() if bearer_key else b""

    @abstractmethod
    async def answer(self, request: Request) -> tuple[int, bytes]:
        """Return the status and the JSON of the response. May raise any exception."""

    def build_error_reply(self, request: Request, error: Exception) -> tuple[int, str]:
        """Return the status and the text for an exception that `answer` raised."""
        if isinstance(error, HTTPException):
            return error.status_code, error.detail
        log.error("%s failed", request.scope["path"], exc_info=error)
        return 500, f"{type(error).__name__}: {error}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this service speaks HTTP only, not {scope['type']}")
        request = Request(scope, receive)
        try:
            self._require_key(request)
            status, content = await self.answer(request)
        except ClientDisconnect:
            return
        except Exception as error:  # boundary: one bad request must not end the service
            status, text = self.build_error_reply(request, error)
            content = msgspec.json.encode({"error": text})
        await Response(content, status, media_type="application/json")(scope, receive, send)

    def _require_key(self, request: Request) -> None:
        header = request.headers.get("authorization", "").encode("latin-1")
        if self._authorization and not hmac.compare_digest(header, self._authorization):
            raise HTTPException(401, "expected the run's bearer key for this service")


class Notifier:
    """Condition of one event loop: `notify_all` wakes every task that awaits `news`."""

    def __init__(self) -> None:
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that the next `notify_all` resolves."""

    def notify_all(self) -> None:
        self.news.set_result(None)
        self.news = asyncio.get_running_loop().create_future()


class LongPoll:
    """Wait of one ASGI request whose body has been read; ends early when its caller hangs up.

    Args:
        clock: Clock of the service.
        receive: `receive` of the request: after the body it yields only `http.disconnect`. None
            for a caller in this process, which does not hang up.
        closing: Resolved when the server stops, which ends the wait.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        receive: Receive | None = None,
        closing: asyncio.Future[None] | None = None,
    ) -> None:
        self._clock, self._receive = clock, receive
        self._closing = closing or asyncio.get_running_loop().create_future()
        self._hang_up: asyncio.Future[Any] | None = None

    async def wait_for(self, notifier: Notifier, until_s: float) -> bool:
        """Return whether a notification came before `until_s` and before the server stops.

        Raises:
            ClientDisconnect: The caller hung up. A ticket granted to it now would be lost.
        """
        left_s = until_s - self._clock()
        if left_s <= 0 or self._closing.done():
            return False
        if self._hang_up is None and self._receive is not None:
            self._hang_up = asyncio.ensure_future(self._receive())
        news = notifier.news
        events = [event for event in (news, self._hang_up, self._closing) if event is not None]
        await asyncio.wait(events, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if self._hang_up is not None and self._hang_up.done():
            raise ClientDisconnect
        return news.done()

    def stop_disconnect_watch(self) -> None:
        if self._hang_up is not None:
            self._hang_up.cancel()
