"""HTTP/1.1 client of POST requests over kept connections.

A general client library handles redirects, cookies, proxies, traces and bodies of every kind, which
would be most of the cost of a call to SGLang. This client only sends bytes to a known server and
wakes up once, when the whole response has come. Responses must declare their length or be chunked,
as SGLang's are: one that lasts until the server hangs up counts as broken off.
"""

import asyncio
import contextlib
import errno
import math
from collections import deque
from collections.abc import AsyncIterator
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MAX_UNREAD_BYTES = 1 << 18
"""Limit of unread bytes of an answer that is read in parts; beyond it the server must wait."""


class Connection(asyncio.Protocol):
    """Connection to a server, with the answer to its one current call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = HttpResponseParser(self)
        self._change: asyncio.Future[None] | None = None
        self._trouble: Exception | None = None
        self._is_reusable = True
        self._reads_parts = False
        self._unread_bytes = 0
        self._blocks: list[bytes] = []
        self._is_whole = True
        self.status = 0
        """Status of the answer; 0 until its head has come."""
        self.idle_since = 0.0

    @property
    def can_be_reused(self) -> bool:
        """Whether it can carry another call: nothing of the last one is left in it."""
        return self._is_whole and self._is_reusable and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, *, reads_parts: bool = False) -> None:
        """Begin a call. `read_body` reads its answer, or `wait_for_status` and `read_part` do."""
        self.status, self._is_whole, self._reads_parts = 0, False, reads_parts
        self._blocks, self._unread_bytes = [], 0
        self._transport.writelines((head, body))

    async def read_body(self) -> bytes:
        if self._reads_parts:  # the rest is read as a whole
            self._reads_parts = False
            self._transport.resume_reading()
        while not self._is_whole:
            await self._wait_for_data()
        return self._pop_received_bytes()

    async def wait_for_status(self) -> None:
        while not self.status:
            await self._wait_for_data()

    async def read_part(self) -> bytes:
        """Return the next part of the body; empty at its end."""
        while not self._blocks and not self._is_whole:
            await self._wait_for_data()
        return self._pop_received_bytes()

    def _pop_received_bytes(self) -> bytes:
        blocks = self._blocks
        self._blocks, self._unread_bytes = [], 0
        if self._reads_parts:
            self._transport.resume_reading()
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    async def _wait_for_data(self) -> None:
        if self._trouble is not None:
            raise self._trouble
        self._change = self._loop.create_future()
        try:
            await self._change
        finally:
            self._change = None

    def _wake_reader(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def fail_call(self, error: Exception) -> None:
        self._is_reusable = False
        self._trouble = error
        self._wake_reader()

    def close(self) -> None:
        self._transport.close()

    # Callbacks of the event loop -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.fail_call(ConnectionError(f"the server does not speak HTTP: {error}"))
            return
        if self._is_whole or self._reads_parts:
            self._wake_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail_call(ConnectionError(f"the server closed the connection: {exc or 'early'}"))

    # Callbacks of the parser ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_whole:  # an answer without a request
            self._is_reusable = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._is_whole:  # a preliminary head has 1xx
            self.status = status

    def on_body(self, block: bytes) -> None:
        if self._is_whole:
            return
        self._blocks.append(block)
        if self._reads_parts:
            self._unread_bytes += len(block)
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status:
            self._is_whole = True
            self._is_reusable = self._is_reusable and self._parser.should_keep_alive()


KEEP_ALIVE_S = 3.0
"""Longest idle time of a connection that is used again. SGLang closes it after 5 s, and a call on a
connection that is being closed would look like one that killed the engine."""


class UnreachableError(ConnectionError):
    """Server that accepts no connection, so that it received nothing of the call."""


class ConnectionPool:
    """Pool of kept connections to one server, without a limit of their number.

    Make it in the event loop. The URL has a scheme, a host, a port and a prefix of all paths, but
    no user and no password. `headers` are lines that every request has.
    """

    def __init__(self, url: str, headers: str, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        self._url = url
        self._host = parts.hostname or ""
        self._is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._path = parts.path
        self._headers = f"HTTP/1.1\r\nhost: {parts.netloc}\r\n{headers}"
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Connection] = deque()
        """Idle connections, the longest idle first."""
        self._is_closed = False
        self.used_at = self._loop.time()
        """Time at which the last call began."""

    async def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        give_up_at = self._loop.time() + timeout_s
        connection = await self._acquire_connection(timeout_s)
        # `asyncio.timeout` would cost four microseconds more.
        timer = self._loop.call_at(give_up_at, connection.fail_call, TimeoutError())
        try:
            connection.send(self._build_head(path, body), body)
            answer = await connection.read_body()
        except BaseException:  # boundary: after any error the state of the connection is unknown
            connection.close()
            raise
        finally:
            timer.cancel()
        self._release_connection(connection)
        return connection.status, answer

    @contextlib.asynccontextmanager
    async def stream_answer(self, path: str, body: bytes) -> AsyncIterator[Connection]:
        """Send a body, and yield the connection for reading once the answer's status is known."""
        connection = await self._acquire_connection()
        try:
            connection.send(self._build_head(path, body), body, reads_parts=True)
            await connection.wait_for_status()
        except BaseException:  # boundary: after any error the state of the connection is unknown
            connection.close()
            raise
        try:
            yield connection
        finally:
            self._release_connection(connection)

    def close(self) -> None:
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _build_head(self, path: str, body: bytes) -> bytes:
        head = f"POST {self._path}{path} {self._headers}content-length: {len(body)}\r\n\r\n"
        return head.encode()

    async def _acquire_connection(self, timeout_s: float = math.inf) -> Connection:
        self.used_at = self._loop.time()
        while self._idle:
            connection = self._idle.pop()
            if connection.can_be_reused and self.used_at - connection.idle_since < KEEP_ALIVE_S:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(min(self._connect_timeout_s, timeout_s)):
                _, connection = await self._loop.create_connection(
                    Connection, self._host, self._port, ssl=True if self._is_secure else None
                )
        except TimeoutError as error:
            if timeout_s < self._connect_timeout_s:
                raise
            raise UnreachableError(f"no connection to {self._url}") from error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files of this process
                raise
            raise UnreachableError(f"no connection to {self._url}: {error}") from error
        return connection

    def _release_connection(self, connection: Connection) -> None:
        if self._is_closed or not connection.can_be_reused:
            connection.close()
            return
        connection.idle_since = now = self._loop.time()
        self._idle.append(connection)
        while now - self._idle[0].idle_since > KEEP_ALIVE_S:
            self._idle.popleft().close()
