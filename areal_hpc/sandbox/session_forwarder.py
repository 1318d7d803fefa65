"""Forwarders from a socket that listens in a sandbox to one address or to named hosts."""

import asyncio
import contextlib
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

MAX_CONNECTIONS = 64
"""Maximum number of open connections of one sandbox; further ones are closed at once."""
_PIECE_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0
_CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class SessionForwarder:
    """Forwarder outside a sandbox from its listening socket to one address."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._host, self._port = "", 0

    async def start_forwarding_to(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._server = await asyncio.start_server(self._forward_connection, sock=self._listener)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        self._listener.close()

    async def _forward_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) < MAX_CONNECTIONS:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._serve_connection(reader, writer)
        await _close_writer(writer)

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await _pump_both_ways(reader, writer, self._host, self._port)


class HostForwarder(SessionForwarder):
    """HTTP proxy that connects a worker only to hosts that a recipe names.

    It accepts CONNECT and absolute request targets (RFC 9112), as clients with `HTTP_PROXY` send
    them.
    """

    def __init__(self, listener: socket.socket, hosts: Collection[str]) -> None:
        super().__init__(listener)
        self._hosts = frozenset(hosts)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._forward_connection, sock=self._listener)

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            words = head.decode("latin-1").partition("\r\n")[0].split(" ")
            if len(words) != 3:
                writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                return
            method, target, _ = words
            host = format_host(target if "://" in target else f"https://{target}")
            if host not in self._hosts:
                writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
                return
            name, _, port = host.rpartition(":")
            name = name.strip("[]")
            if method != "CONNECT":
                await _pump_both_ways(reader, writer, name, int(port), _make_own_request(head))
                return
            await _pump_both_ways(reader, writer, name, int(port), answer=_CONNECTED)


def _make_own_request(head: bytes) -> bytes:
    first, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    method, target, version = first.split(b" ", 2)
    path = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    kept = [field for field in fields if b"connection" not in field.partition(b":")[0].lower()]
    lines = [b" ".join((method, path, version)), *kept, b"connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def format_host(url: str) -> str:
    """Return `HOST:PORT` of a URL; empty if the URL is invalid."""
    try:
        address = urlsplit(url)
        port = address.port or {"http": 80, "ws": 80}.get(address.scheme, 443)
    except ValueError:
        return ""
    name = address.hostname or ""
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}" if name else ""


async def _pump_both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    host: str,
    port: int,
    opening: bytes = b"",
    answer: bytes = b"",
) -> None:
    """Connect, send `opening` onward and `answer` back, and copy bytes until both sides end."""
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        onward, upward = await asyncio.open_connection(host, port)
    try:
        upward.write(opening)
        writer.write(answer)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy_stream(reader, upward))
            both.create_task(_copy_stream(onward, writer))
    finally:
        await _close_writer(upward)


async def _copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the reader ends, then close the writer's direction."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def _close_writer(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()
