"""uvicorn's HTTP protocol, in two things cheaper for a request that waits for a model.

The head of a response is sent together with its first block. uvicorn writes one after the other:
two packets, two system calls, and a client that wakes up twice.

A future of the connection tells that the client has hung up. To ask uvicorn again and again, for
messages that are not to come, takes an event, a future and a coroutine for every request.
"""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from areal_hpc.proxy.hanging_up import GONE

HEAD, CONTINUE = b"HTTP/1.1 ", b"HTTP/1.1 100 "


class _HeadHolder:
    """As much of a transport as uvicorn uses."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.get_extra_info = transport.get_extra_info
        self.set_protocol = transport.set_protocol
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        """Send, unless it is the head of a response: the first block of the body follows at once.

        A client that waits for leave to send its body is answered immediately.
        """
        if self._head:
            self._transport.write(self._head + data)
            self._head = b""
        elif data.startswith(HEAD) and data.endswith(b"\r\n\r\n") and data[:13] != CONTINUE:
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """No body follows: there is none in the answer to HEAD."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Hang up once everything has been sent."""
        self.flush()
        self._transport.close()


class ResponseProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has come."""
        self._holder = _HeadHolder(transport)
        self._gone: asyncio.Future[None] = self.loop.create_future()
        self._extensions: dict[str, dict[object, object]] = {GONE: {"future": self._gone}}
        super().connection_made(cast(asyncio.Transport, self._holder))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was hung up on."""
        self._gone.set_result(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def _unsupported_upgrade_warning(self) -> None:
        """The application refuses it; to install a library for WebSockets would not help."""

    def on_response_complete(self) -> None:
        """The application has said everything."""
        self._holder.flush()
        super().on_response_complete()
