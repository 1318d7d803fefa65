"""Server-sent events of a model call: headers, events, and pings while there are none.

Clients, and HTTP proxies before this one, give up on a stream that is silent for minutes, for
example while the model writes a long tool call or the call waits for a replica.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.reply import ReplyStream
from areal_hpc.proxy.dialects.dialect import Exchange

log = logging.getLogger(__name__)

PING_AFTER_S = 10.0
"""Silence after which a stream sends a ping."""
Headers = list[tuple[bytes, bytes]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
"""Type of `send` in ASGI."""


class EventStream:
    def __init__(
        self, send: Send, headers: Headers, exchange: Exchange, *, keeps_content: bool
    ) -> None:
        self._send = send
        kind = (b"content-type", exchange.stream_media_type.encode())
        self._headers = [kind, (b"cache-control", b"no-cache"), *headers]
        self._format_ping = exchange.format_ping
        self.begun = False
        """Whether the status is sent: then an error can only be an event of the stream."""
        self.content: list[bytes] | None = [] if keeps_content else None
        """Blocks that were sent."""
        self._last_sent_at = time.monotonic()
        self._sending = asyncio.Lock()

    async def send(self, block: bytes, *, is_last: bool = False) -> None:
        """Send whole events, and before the first ones the head of the answer."""
        async with self._sending:
            if not self.begun:
                self.begun = True
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(start)
            if self.content is not None:
                self.content.append(block)
            await self._send(
                {"type": "http.response.body", "body": block, "more_body": not is_last}
            )
        self._last_sent_at = time.monotonic()

    async def ping_when_silent(self) -> None:
        """Send a ping after each `PING_AFTER_S` without other events, until cancelled."""
        while True:
            silence_s = time.monotonic() - self._last_sent_at
            if silence_s >= PING_AFTER_S:
                await self.send(self._format_ping())
            else:
                await asyncio.sleep(PING_AFTER_S - silence_s)


async def send_events(
    send: Send,
    headers: Headers,
    exchange: Exchange,
    reply_stream: ReplyStream,
    *,
    keeps_content: bool,
) -> tuple[bytes, bool]:
    """Send a reply's events; return them if they are kept, and whether there was no error."""
    stream = EventStream(send, headers, exchange, keeps_content=keeps_content)
    events = exchange.stream_events(reply_stream)
    pinger = asyncio.create_task(stream.ping_when_silent())
    is_whole = False
    try:
        async for block in events:
            await stream.send(block)
        is_whole = True
    except Exception as caught:  # boundary: sent to the client as an event
        if not stream.begun:
            raise
        await stream.send(exchange.format_error_event(to_request_error(caught)))
    finally:
        reply_stream.stop_generation()  # no effect after the end
        pinger.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pinger
        await events.aclose()
    await stream.send(b"", is_last=True)
    return b"".join(stream.content or ()), is_whole


def to_request_error(error: Exception) -> ProxyRequestError:
    if isinstance(error, ProxyRequestError):
        return error
    log.error("a request failed", exc_info=error)
    return ProxyRequestError(500, "internal error of the proxy; see its log")
