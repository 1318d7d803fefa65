"""HTTP/1.1 client connection.

Answers must say where they end (SGLang's do): one that lasts until the server hangs up counts as
broken off.
"""

import asyncio
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MAX_UNREAD_BYTES = 1 << 18
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
    def can_be_reused(self) -> bool:
        """It can carry another call: nothing of this one is left in it."""
        return self._is_whole and self._is_reusable and not self._transport.is_closing()

    def send(self, request: bytes, *, reads_parts: bool = False) -> None:
        """Begin a call. `read_body` reads its answer, or `wait_for_status` and `read_part` do."""
        self.status, self._is_whole, self._reads_parts = 0, False, reads_parts
        self._blocks, self._unread_bytes = [], 0
        self._transport.write(request)

    async def read_body(self) -> bytes:
        """The answer's body.

        Raises:
            ConnectionError: The server left, or does not speak HTTP.
        """
        if self._reads_parts:  # from now on no more
            self._reads_parts = False
            self._transport.resume_reading()
        while not self._is_whole:
            await self._wait_for_data()
        return self._pop_received_bytes()

    async def wait_for_status(self) -> None:
        """Wait until the status is known. Raises as `read_body` does."""
        while not self.status:
            await self._wait_for_data()

    async def read_part(self) -> bytes:
        """More of the body, nothing at its end. Raises as `read_body` does."""
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
        """End the call, and the connection with it."""
        self._is_reusable = False
        self._trouble = error
        self._wake_reader()

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    # What the event loop tells -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server has accepted."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.fail_call(ConnectionError(f"the server does not speak HTTP: {error}"))
            return
        if self._is_whole or self._reads_parts:
            self._wake_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has left, or was hung up on."""
        self.fail_call(ConnectionError(f"the server closed the connection: {exc or 'early'}"))

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
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """An answer ends."""
        if self.status:
            self._is_whole = True
            self._is_reusable = self._is_reusable and self._parser.should_keep_alive()
