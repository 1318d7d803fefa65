"""HTTP server of the run's services: uvicorn with limits, and the shell of their applications.

uvicorn waits for the rest of a request as long as its client likes, takes heads of any length, and
accepts connections until the process has no descriptor left for anything else.

Of Starlette it uses what reads requests and writes responses. Its routing and its error middleware
are not used: the latter raises a handled exception again, at which uvicorn closes the connection.
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
"""From the first byte of a request, or from the connection, to the end of the headers. A TLS
handshake has as long."""
REQUEST_RECEIVE_TIMEOUT_S = 120.0
"""From the same to the end of the body."""
MAX_HEAD_BYTES = 64 * 1024
TLS_SHUTDOWN_TIMEOUT_S = 2.0
"""For which a connection that was closed waits for its client's end."""
TICKS_PER_DEADLINE_CHECK = 10
"""uvicorn's ticks are 0.1 s apart."""
RESERVED_DESCRIPTORS = 128
"""For everything but connections: files, pipes, the event loop."""
MIN_CONNECTIONS = 16
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""More than any message between roles takes."""
CONNECTION_KEY = "areal_hpc.connection"
"""Where an ASGI application finds the `GuardedProtocol` of a request in its scope."""


def get_connection_descriptor_limit() -> int:
    """Descriptors that this process may use for connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return max(soft - RESERVED_DESCRIPTORS, 2 * MIN_CONNECTIONS)


class GuardedProtocol(HttpToolsProtocol):
    _awaits = "head"
    """Part of a request that has begun: `head`, `body`, or nothing."""
    _awaits_since = 0.0
    _head_bytes = 0
    _has_asked = False
    _is_overdue = False
    has_disconnected = False
    on_disconnect: Callable[[], object] | None = None
    """Called when the client hangs up. A task that waits for that would cost each call 30 us."""

    def __init__(self, *, max_connections: int, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_part_deadline("head")
        if len(self.connections) > self._max_connections and not self._drop_silent_connection():
            self.refuse_and_hang_up(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.has_disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()

    def _drop_silent_connection(self) -> bool:
        """Close the oldest connection that has never asked for anything, if there is one."""
        silent = [
            one
            for one in self.connections
            if isinstance(one, GuardedProtocol) and not one._has_asked and one is not self
        ]
        if not silent:
            return False
        oldest = min(silent, key=lambda one: one._awaits_since)
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
                self.refuse_and_hang_up(431, f"the headers exceed {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        if self._awaits != "head":  # several may come at once
            self._start_part_deadline("head")
        super().on_message_begin()
        scope: Any = self.scope
        scope[CONNECTION_KEY] = self

    def on_headers_complete(self) -> None:
        self._awaits = "body"
        super().on_headers_complete()
        self._has_asked = True

    def on_message_complete(self) -> None:
        self._awaits = ""
        super().on_message_complete()

    def _start_part_deadline(self, request_part: str) -> None:
        self._awaits, self._awaits_since, self._head_bytes = request_part, self.loop.time(), 0
        self._is_overdue = False

    @property
    def _is_answering(self) -> bool:
        """A request has come that is not answered yet. Before the first there is no cycle."""
        return self._has_asked and not self.cycle.response_complete

    def enforce_deadline(self, now: float) -> None:
        """Hang up if the client has been late at two looks: a stalled server reads late itself."""
        if not self._awaits:
            return
        if self._awaits == "head" and self._is_answering:
            return  # it waits for an answer, and has begun to ask for the next
        limit_s = REQUEST_HEAD_TIMEOUT_S if self._awaits == "head" else REQUEST_RECEIVE_TIMEOUT_S
        if now - self._awaits_since < limit_s:
            return
        if self._is_overdue and not self.transport.is_closing():
            self.refuse_and_hang_up(
                408, f"the request's {self._awaits} did not come within {limit_s:.0f} s"
            )
        self._is_overdue = True

    def refuse_and_hang_up(self, status_code: int, message: str) -> None:
        if not (self._is_answering and self.cycle.response_started):
            head = (
                f"HTTP/1.1 {status_code} Refused\r\ncontent-type: text/plain\r\nretry-after: 1\r\n"
            )
            head += f"content-length: {len(message)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + message.encode())
        self.transport.close()

    def shutdown(self) -> None:
        """The server stops: hang up at once, or after the answer that is under way."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.transport.abort()  # an idle client would not answer the end of TLS


class GuardedServer(uvicorn.Server):
    """uvicorn with deadlines, and no more connections than there are descriptors for."""

    def __init__(
        self, app: Any, max_connections: int, tls: ssl.SSLContext | None = None, **options: Any
    ) -> None:
        protocol: Any = partial(GuardedProtocol, max_connections=max_connections)
        options = {
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            # Longer than clients keep a connection: one closed just as it is used again would lose
            # a call, such as one of an update of weights.
            "timeout_keep_alive": SERVER_KEEP_ALIVE_S,
            "backlog": 2048,
        } | options
        super().__init__(uvicorn.Config(app, http=protocol, **options))
        self._max_connections = max_connections
        self._tls = tls
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[bool], socket.socket] = {}
        """The oldest first."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections. uvicorn would neither count nor limit TLS handshakes."""
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
        except OSError:  # no TLS, no trust in this certificate, or too slow
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
    """HTTP server of one application. Its owner stops it by `should_exit`, no signal does."""

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
        """False if that would be too many."""
        if self._held_bytes + count > self._max_bytes:
            return False
        self._held_bytes += count
        return True

    def release(self, count: int) -> None:
        self._held_bytes -= count


async def read_body(request: Request, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The body of a request; nothing of it is read if it is announced to be too large.

    Raises:
        HTTPException: 413.
        ClientDisconnect: The client left before it had sent all.
    """
    too_large = HTTPException(413, f"a body holds at most {max_bytes} bytes")
    announced = request.headers.get("content-length", "0")
    body = bytearray()
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def read_message(request: Request, message_type: type[MessageT]) -> MessageT:
    """The JSON of a request.

    Raises:
        HTTPException: 413; or 400: it is none of that form, no UTF-8, or nested beyond all reason.
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
    """ASGI application whose answers are JSON, and whose errors are `{"error": "..."}`.

    Nothing is read of a request that does not show `bearer_key`, if there is one.
    """

    def __init__(self, bearer_key: str = "") -> None:
        self._authorization = f"Bearer {bearer_key}".encode() if bearer_key else b""

    @abstractmethod
    async def answer(self, request: Request) -> tuple[int, bytes]:
        """Status and JSON of the answer to a request. May raise whatever it likes."""

    def get_error_status_and_text(self, request: Request, error: Exception) -> tuple[int, str]:
        """Status and text for what `answer` has raised."""
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
            status, text = self.get_error_status_and_text(request, error)
            content = msgspec.json.encode({"error": text})
        await Response(content, status, media_type="application/json")(scope, receive, send)

    def _require_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._authorization and not hmac.compare_digest(given, self._authorization):
            raise HTTPException(401, "expected the run's bearer key for this service")


class Notifier:
    """Wakes everyone who waits for `news`."""

    def __init__(self) -> None:
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved by the next `notify_all`."""

    def notify_all(self) -> None:
        self.news.set_result(None)
        self.news = asyncio.get_running_loop().create_future()


class LongPoll:
    """Wait of one ASGI request whose body has been read; ends early when its caller is gone.

    Args:
        clock: That of the service.
        receive: The request's: after the body it yields only `http.disconnect`. None: a caller in
            this process, which does not hang up.
        closing: Resolved when the server stops: then nobody waits any more.
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
        """True after a notification; False once `until_s` has come or the server stops.

        Raises:
            ClientDisconnect: The caller hung up. A ticket granted to it now would be lost.
        """
        left_s = until_s - self._clock()
        if left_s <= 0 or self._closing.done():
            return False
        if self._hang_up is None and self._receive is not None:
            self._hang_up = asyncio.ensure_future(self._receive())
        news = notifier.news
        ends = [one for one in (news, self._hang_up, self._closing) if one is not None]
        await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if self._hang_up is not None and self._hang_up.done():
            raise ClientDisconnect
        return news.done()

    def stop_disconnect_watch(self) -> None:
        if self._hang_up is not None:
            self._hang_up.cancel()
