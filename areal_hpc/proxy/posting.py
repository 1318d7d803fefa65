"""POST requests over kept connections: httptools' parser on a protocol of our own.

A client library is made for any request to anybody: redirects, cookies, proxies, traces, bodies of
every kind. That is most of what a call to SGLang would cost here, and nothing of it is needed to
send bytes to a server of our own and to wake up once, when all of its answer has come.

Answers must say where they end (SGLang's do): one that lasts until the server hangs up counts as
broken off.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

KEPT_S = 15.0
"""Connections that idled for longer are not used: servers close theirs at some time, too."""
MOST_UNREAD_BYTES = 1 << 18
"""Of an answer that is read in parts; the server must wait while so much has not been read."""


class Connection(asyncio.Protocol):
    """A connection, and the answer that comes over it. It carries one call at a time."""

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
        """Of the answer; 0 until its head has come."""
        self.idle_since = 0.0

    @property
    def is_sound(self) -> bool:
        """It can carry another call: nothing of this one is left in it."""
        return self._is_whole and self._is_reusable and not self._transport.is_closing()

    def send(self, request: bytes, *, reads_parts: bool = False) -> None:
        """Begin a call.

        Args:
            request: All of it.
            reads_parts: The answer will be read by `head` and `part`, not by `whole`.
        """
        self.status, self._is_whole, self._reads_parts = 0, False, reads_parts
        self._blocks, self._unread_bytes = [], 0
        self._transport.write(request)

    async def whole(self) -> bytes:
        """The answer's body.

        Raises:
            ConnectionError: The server left, or does not speak HTTP.
        """
        while not self._is_whole:
            await self._changed()
        return self._taken()

    async def head(self) -> None:
        """Wait until the status is known. Raises as `whole` does."""
        while not self.status:
            await self._changed()

    async def part(self) -> bytes:
        """More of the body, nothing at its end. Raises as `whole` does."""
        while not self._blocks and not self._is_whole:
            await self._changed()
        return self._taken()

    def _taken(self) -> bytes:
        blocks = self._blocks
        self._blocks, self._unread_bytes = [], 0
        if self._reads_parts:
            self._transport.resume_reading()
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    async def _changed(self) -> None:
        if self._trouble is not None:
            raise self._trouble
        self._change = self._loop.create_future()
        try:
            await self._change
        finally:
            self._change = None

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def fail(self, trouble: Exception) -> None:
        """End the call, and the connection with it."""
        self._is_reusable = False
        self._trouble = trouble
        self._wake()

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    # What the event loop tells -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none

    def data_received(self, data: bytes) -> None:  # noqa: D102
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.fail(ConnectionError(f"the server does not speak HTTP: {error}"))
            return
        if self._is_whole or self._reads_parts:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self.fail(ConnectionError(f"the server left: {exc or 'before the end of its answer'}"))

    # What the parser tells -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self._is_whole:  # nobody asked
            self._is_reusable = False

    def on_headers_complete(self) -> None:
        """The head of an answer has come, perhaps only a preliminary one."""
        status = self._parser.get_status_code()
        if status >= 200 and not self._is_whole:
            self.status = status

    def on_body(self, block: bytes) -> None:
        """More of the body has come."""
        if self._is_whole:
            return
        self._blocks.append(block)
        if self._reads_parts:
            self._unread_bytes += len(block)
            if self._unread_bytes > MOST_UNREAD_BYTES:
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """An answer ends."""
        if self.status:
            self._is_whole = True
            self._is_reusable = self._is_reusable and self._parser.should_keep_alive()


class Connections:
    """Kept connections to one server; as many as there are calls at a time."""

    def __init__(self, url: str, headers: str, connect_timeout_s: float) -> None:
        """Prepare; nothing is sent. To be made inside the event loop.

        Args:
            url: Scheme, host and port, and what all paths begin with.
            headers: Lines that every request has.
            connect_timeout_s: How long a server may take to accept.
        """
        parts = urlsplit(url)
        self._url = url
        self._host = parts.hostname or ""
        self._is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._path = parts.path
        host = parts.netloc.rpartition("@")[2]
        self._headers = f"HTTP/1.1\r\nhost: {host}\r\n{headers}"
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Connection] = deque()
        """The longest first."""

    async def ask(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Send a body; status and body of the answer.

        Raises:
            TimeoutError: That took too long.
            ConnectionError: The server does not accept, left, or does not speak HTTP.
            OSError: It cannot be found.
        """
        give_up_at = self._loop.time() + timeout_s
        connection = await self._take(timeout_s)
        # Much cheaper than `asyncio.timeout`, which cancels the task and must tell who else did.
        timer = self._loop.call_at(give_up_at, connection.fail, TimeoutError())
        try:
            connection.send(self._request(path, body))
            answer = await connection.whole()
        except BaseException:  # boundary: whatever ended it, the connection is in no known state
            connection.close()
            raise
        finally:
            timer.cancel()
        self._give_back(connection)
        return connection.status, answer

    def post(self, path: str, body: bytes) -> Posted:
        """Send a body; `async with` gives the connection, once it knows the answer's status.

        Raises:
            ConnectionError: The server does not accept, left, or does not speak HTTP.
            OSError: It cannot be found.
        """
        return Posted(self, self._request(path, body))

    def close(self) -> None:
        """Close what idles."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _request(self, path: str, body: bytes) -> bytes:
        head = f"POST {self._path}{path} {self._headers}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def _take(self, timeout_s: float = math.inf) -> Connection:
        """An open connection, the one used last if there is any."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_sound and self._loop.time() - connection.idle_since < KEPT_S:
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
            raise ConnectionError(f"no connection to {self._url}") from error
        return connection

    def _give_back(self, connection: Connection) -> None:
        """Keep the connection for the next call, unless something of this one is left in it."""
        if not connection.is_sound:
            connection.close()
            return
        connection.idle_since = now = self._loop.time()
        self._idle.append(connection)
        while now - self._idle[0].idle_since > KEPT_S:
            self._idle.popleft().close()


class Posted:
    """A request under way whose answer is read in parts."""

    def __init__(self, connections: Connections, request: bytes) -> None:
        self._connections = connections
        self._request = request
        self._connection: Connection

    async def __aenter__(self) -> Connection:
        self._connection = await self._connections._take()
        try:
            self._connection.send(self._request, reads_parts=True)
            await self._connection.head()
        except BaseException:  # boundary: whatever ended it, the connection is in no known state
            self._connection.close()
            raise
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connections._give_back(self._connection)
