"""A stream of events: its head comes with the first of them, and signs of life in silence."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.streaming import RecordedChoice, ReplyStream
from areal_hpc.proxy.dialects.dialect import Exchange
from areal_hpc.proxy.http import event_stream
from areal_hpc.proxy.http.event_stream import send_events


class Silent(Exchange):
    """A reply of two events, of which the second comes when it is let, and may be an error."""

    def __init__(self, first: bytes, error: Exception | None = None) -> None:
        self.first, self.error = first, error
        self.gate = asyncio.Event()

    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        raise NotImplementedError

    async def stream_events(self, live: ReplyStream) -> AsyncGenerator[bytes, None]:
        if self.first:
            yield self.first
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        yield b"last"

    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        return f"error {refusal.status}".encode()


class Client:
    """What was sent."""

    def __init__(self) -> None:
        self.started = 0
        self.blocks: list[bytes] = []
        self.has_ended = False

    async def receive(self, message: Any) -> None:
        assert not self.has_ended
        if message["type"] == "http.response.start":
            assert self.started == len(self.blocks) == 0
            self.started += 1
            return
        assert self.started == 1
        self.blocks.append(message["body"])
        self.has_ended = not message["more_body"]

    async def await_pings(self, count: int, sending: asyncio.Task[tuple[bytes, bool]]) -> None:
        while self.blocks.count(Silent.ping_event) < count and not sending.done():
            await asyncio.sleep(0.001)


def stream(exchange: Silent, pings: int) -> tuple[Client, ReplyStream]:
    """The client, and the reply, after a stream in which so many pings came before its gate."""
    client, live = Client(), ReplyStream(1)

    async def run() -> None:
        told = send_events(client.receive, [], exchange, live, keeps_content=False)
        sending = asyncio.create_task(told)
        await client.await_pings(pings, sending)
        exchange.gate.set()
        await sending

    asyncio.run(run())
    return client, live


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "PING_AFTER_S", 0.002)


@pytest.mark.usefixtures("quick_pings")
@pytest.mark.parametrize("first", [b"", b"first"])
def test_a_silent_reply_is_pinged_until_it_speaks(first: bytes) -> None:
    client, live = stream(Silent(first), pings=3)
    said = [block for block in client.blocks if block != Silent.ping_event]
    assert said == [*([first] if first else []), b"last", b""]
    assert client.has_ended
    assert live.abandoned


@pytest.mark.usefixtures("quick_pings")
def test_an_error_after_a_ping_is_told_within_the_stream() -> None:
    client, live = stream(Silent(b"", ProxyRequestError(503, "lost")), pings=1)
    assert client.blocks[-2:] == [b"error 503", b""]
    assert live.abandoned


def test_an_error_before_anything_was_sent_has_a_status_of_its_own() -> None:
    exchange = Silent(b"", ProxyRequestError(400, "wrong"))
    with pytest.raises(ProxyRequestError, match="wrong"):
        stream(exchange, pings=0)
