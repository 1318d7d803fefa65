"""POST requests over kept connections: aiohttp's protocol and parser without its `ClientSession`.

A session is made for any request to anybody: redirects, cookies, proxies, traces, bodies of every
kind, each written by a task of its own before Python 3.12. That is most of what a call to SGLang
costs here, and nothing of it is needed to send bytes to a server of our own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from types import TracebackType
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler

KEPT_S = 15.0
"""Connections that idled for longer are not used: servers close theirs at some time, too."""


class Connections:
    """Kept connections to one server; as many as there are calls at a time."""

    def __init__(self, url: str, headers: str, connect_timeout_s: float) -> None:
        """Prepare; nothing is sent.

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
        self._idle: deque[tuple[ResponseHandler, float]] = deque()
        """With the time since when, the longest first."""

    async def take(self) -> ResponseHandler:
        """An open connection, the one used last if there is any.

        Raises:
            ServerTimeoutError: The server does not accept.
            OSError: It refuses, or cannot be found.
        """
        while self._idle:
            connection, idle_since = self._idle.pop()
            if _is_sound(connection) and time.monotonic() - idle_since < KEPT_S:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        ssl = True if self._is_secure else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    partial(ResponseHandler, loop), self._host, self._port, ssl=ssl
                )
        except TimeoutError as error:
            raise aiohttp.ServerTimeoutError(f"no connection to {self._url}") from error
        return connection

    def give_back(self, connection: ResponseHandler) -> None:
        """Keep the connection for the next call, unless something of this one is left in it."""
        if not _is_sound(connection):
            connection.close()
            return
        now = time.monotonic()
        self._idle.append((connection, now))
        while now - self._idle[0][1] > KEPT_S:
            self._idle.popleft()[0].close()

    def post(self, path: str, body: bytes) -> Posted:
        """Send a body; `async with` gives the answer.

        Raises:
            ClientError: The server is not there, left, or does not speak HTTP.
        """
        head = f"POST {self._path}{path} {self._headers}content-length: {len(body)}\r\n\r\n"
        return Posted(self, head.encode() + body)

    def close(self) -> None:
        """Close what idles."""
        for connection, _ in self._idle:
            connection.close()
        self._idle.clear()


def _is_sound(connection: ResponseHandler) -> bool:
    return connection.is_connected() and not connection.should_close


class Posted:
    """A request under way, and its answer once its head has come."""

    status: int
    content: aiohttp.StreamReader

    def __init__(self, connections: Connections, request: bytes) -> None:
        self._connections = connections
        self._request = request
        self._connection: ResponseHandler

    async def __aenter__(self) -> Posted:
        self._connection = connection = await self._connections.take()
        try:
            connection.set_response_params(read_until_eof=True, auto_decompress=False)
            assert connection.transport is not None
            connection.transport.write(self._request)
            message, self.content = await connection.read()
            while 100 <= message.code < 200:
                message, self.content = await connection.read()
        except BaseException:  # boundary: whatever ended it, the connection is in no known state
            connection.close()
            raise
        self.status = message.code
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connections.give_back(self._connection)
