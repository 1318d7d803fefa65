"""Keep-alive POST requests with one timer.

A client library is made for any request to anybody: redirects, cookies, proxies, traces, bodies of
every kind. That is most of what a call to SGLang would cost here, and nothing of it is needed to
send bytes to a server of our own and to wake up once, when all of its answer has come.
"""

import asyncio
import contextlib
import errno
import math
from collections import deque
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from areal_hpc.proxy.engine.http_connection import Connection

TIMER_RESOLUTION_S = 0.001
"""uvloop's timers count milliseconds."""
KEEP_ALIVE_S = 3.0
"""Connections that idled for longer are not used. SGLang closes its own after 5 s, and a call on
one that it is just closing would look as if the engine had died of it."""


class UnreachableError(ConnectionError):
    """A server that cannot be connected to: it has seen nothing of the call."""


class _ConnectionTimeouts:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits: dict[Connection, float] = {}
        self._timer: asyncio.Handle | None = None
        self._timer_at = math.inf
        """Kept here: what uvloop gives for a time that is over already cannot be asked for it."""

    def add(self, connection: Connection, deadline: float) -> None:
        """The connection's call fails at that time of the loop's clock."""
        self._limits[connection] = deadline
        if deadline < self._timer_at:
            self._set_timer(deadline)

    def drop(self, connection: Connection) -> None:
        self._limits.pop(connection, None)

    def stop_timer_if_unused(self) -> None:
        if self._timer is not None and not self._limits:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _set_timer(self, limit: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(limit, self._fail_late_calls)
        self._timer_at = limit

    def _fail_late_calls(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._loop.time() + TIMER_RESOLUTION_S
        for connection, limit in [*self._limits.items()]:
            if limit <= now:
                self.drop(connection)
                connection.fail_call(TimeoutError())
        if self._limits:
            self._set_timer(min(self._limits.values()))


class ConnectionPool:
    """Kept connections to one server; as many as there are calls at a time.

    To be made inside the event loop. The URL is scheme, host and port, and what all paths begin
    with: no user, no password. `headers` are lines that every request has.
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
        self._limits = _ConnectionTimeouts()
        self._idle: deque[Connection] = deque()
        """The longest first."""
        self._is_closed = False
        self.used_at = self._loop.time()
        """When a call began, last."""

    async def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Send a body; status and body of the answer.

        Raises:
            TimeoutError: That took too long.
            UnreachableError: The server cannot be found, or does not accept.
            ConnectionError: It left, or does not speak HTTP.
        """
        give_up_at = self._loop.time() + timeout_s
        connection = await self._acquire_connection(timeout_s)
        self._limits.add(connection, give_up_at)
        try:
            connection.send(self._build_request(path, body))
            answer = await connection.read_body()
        except BaseException:  # boundary: whatever ended it, the connection is in no known state
            connection.close()
            raise
        finally:
            self._limits.drop(connection)
        self._release_connection(connection)
        return connection.status, answer

    @contextlib.asynccontextmanager
    async def post_and_stream_answer(self, path: str, body: bytes) -> AsyncIterator[Connection]:
        """Send a body; gives the connection, once it knows the answer's status, to read the rest.

        Raises:
            UnreachableError: The server cannot be found, or does not accept.
            ConnectionError: It left, or does not speak HTTP.
        """
        connection = await self._acquire_connection()
        try:
            connection.send(self._build_request(path, body), reads_parts=True)
            await connection.wait_for_status()
        except BaseException:  # boundary: whatever ended it, the connection is in no known state
            connection.close()
            raise
        try:
            yield connection
        finally:
            self._release_connection(connection)

    def close(self) -> None:
        """Close what idles, and later what is under way."""
        self._is_closed = True
        self._limits.stop_timer_if_unused()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _build_request(self, path: str, body: bytes) -> bytes:
        head = f"POST {self._path}{path} {self._headers}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body

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
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no fault of the server
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
