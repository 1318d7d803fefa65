"""Forwarder of a `session-only` network: from a socket that listens in a sandbox to one address."""

import asyncio
import contextlib
import socket

MAX_CONNECTIONS = 64
"""Of one sandbox at once; more are closed as they come."""
_PIECE_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0


class SessionForwarder:
    """Serves a sandbox's listening socket from outside of it, and connects to nothing else."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._host, self._port = "", 0

    async def start_forwarding_to(self, host: str, port: int) -> None:
        """Pass on every connection, also those that wait already."""
        self._host, self._port = host, port
        self._server = await asyncio.start_server(self._forward_connection, sock=self._listener)

    async def close(self) -> None:
        """Close the socket and every connection."""
        if self._server is not None:
            self._server.close()
        for one in self._connections:
            one.cancel()
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
                await self._connect_and_pump_both_ways(reader, writer)
        await _close_writer(writer)

    async def _connect_and_pump_both_ways(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            onward, upward = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy_until_closed(reader, upward))
                both.create_task(_copy_until_closed(onward, writer))
        finally:
            await _close_writer(upward)


async def _copy_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Move bytes until one side ends; the other is told that no more will come."""
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
