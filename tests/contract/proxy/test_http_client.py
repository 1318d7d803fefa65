"""The HTTP client keeps a connection to SGLang only while the connection is sound."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Self

import pytest
import uvloop

from areal_hpc.proxy.engine import sglang_client
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.http_client import ConnectionPool
from areal_hpc.proxy.engine.sglang_client import GenerateRequest, SGLangClient
from areal_hpc.wire.replicas import ReplicaView
from tests.support.deadlines import scaled

pytestmark = pytest.mark.asyncio
REQUEST = GenerateRequest("rid", b"5", SamplingParams(1.0, 1))
SGLANG_KEEP_ALIVE_S = 5.0
PATIENCE_S = scaled(30.0)
"""Time after which a missing event counts as never."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


class ScriptedServer:
    """Server that answers each request with the next script, and may hang up after it."""

    def __init__(self, *scripts: bytes, hangs_up: bool = False) -> None:
        self._scripts = iter(scripts)
        self._hangs_up = hangs_up
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.accepted = 0
        self.left = 0
        self._serving: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/sub"
        self.connections = ConnectionPool(self.url, "x-mark: 1\r\n", PATIENCE_S)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.connections.close()
        self._server.close()
        await asyncio.wait_for(asyncio.gather(*self._serving), PATIENCE_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving.append(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                self.heads.append(head)
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                writer.write(next(self._scripts))
                await writer.drain()
                if self._hangs_up:
                    break
        self.left += 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def ask_by_another(self) -> None:
        """Make one more call that does not use the connection of the call before."""
        accepted = self.accepted
        assert await self.ask() == (200, b"two")
        assert self.accepted == accepted + 1

    async def ask(self, body: bytes = b"{}") -> tuple[int, bytes]:
        return await self.connections.post("/generate", body, PATIENCE_S)


def answer(body: bytes, *, extra: bytes = b"", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, extra, len(body), body)


HALF = answer(b"x" * 100)[:-50]
TWO = answer(b"two")


async def test_one_connection_carries_calls_that_come_after_one_another() -> None:
    async with ScriptedServer(answer(b"one"), answer(b"two", status=b"503 Busy")) as server:
        assert await server.ask(b'{"a":1}') == (200, b"one")
        assert await server.ask(b"x" * 300_000) == (503, b"two")
        assert server.accepted == 1
        assert server.bodies == [b'{"a":1}', b"x" * 300_000]
        path, host, mark, *_ = server.heads[0].split("\r\n")
        assert path == "post /sub/generate http/1.1"
        assert host.startswith("host: 127.0.0.1:")
        assert mark == "x-mark: 1"


async def test_a_connection_that_sglang_may_be_closing_is_not_used() -> None:
    async with ScriptedServer(answer(b"one"), TWO) as server:
        assert await server.ask() == (200, b"one")
        await asyncio.sleep(SGLANG_KEEP_ALIVE_S - 1.5)
        await server.ask_by_another()


@pytest.mark.parametrize(
    ("script", "hangs_up"),
    [
        (answer(b"one", extra=b"connection: close\r\n"), False),
        (answer(b"one"), True),
        (answer(b"one") + answer(b"nobody asked"), False),
    ],
    ids=["said to close", "hung up", "says more"],
)
async def test_an_unsound_connection_is_not_used_again(script: bytes, hangs_up: bool) -> None:
    async with ScriptedServer(script, TWO, hangs_up=hangs_up) as server:
        assert await server.ask() == (200, b"one")
        await asyncio.sleep(0.05)
        await server.ask_by_another()


async def test_an_answer_that_is_left_half_read_closes_its_connection() -> None:
    async with ScriptedServer(HALF, TWO) as server:
        async with server.connections.stream_answer("/generate", b"{}") as half:
            assert await half.read_part() == b"x" * 50
        await server.ask_by_another()


async def test_a_call_that_is_cancelled_closes_its_connection() -> None:
    async with ScriptedServer(b"", TWO) as server:
        call = asyncio.ensure_future(server.ask())
        await until(lambda: len(server.bodies) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.ask_by_another()


@pytest.mark.parametrize("script", [b"", HALF], ids=["at once", "half way"])
async def test_a_server_that_leaves_is_a_connection_error(script: bytes) -> None:
    async with ScriptedServer(script, hangs_up=True) as server:
        with pytest.raises(ConnectionError):
            await server.ask()


async def test_an_answer_that_does_not_come_in_time_is_a_timeout() -> None:
    async with ScriptedServer(answer(b"one"), HALF, TWO) as server:
        assert await server.ask() == (200, b"one")  # opens a connection
        with pytest.raises(TimeoutError):
            await server.connections.post("/generate", b"{}", 0.1)
        await server.ask_by_another()


async def test_each_call_has_a_time_limit_of_its_own() -> None:
    async def waits_s(server: ScriptedServer, timeout_s: float) -> float:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await server.connections.post("/generate", b"{}", timeout_s)
        return time.monotonic() - began

    async with ScriptedServer(*[b""] * 4) as server:
        calls = [asyncio.ensure_future(waits_s(server, limit)) for limit in (60.0, 0.4, 60.0, 0.2)]
        assert await calls[3] >= 0.2
        assert await calls[1] >= 0.4
        for patient in (calls[0], calls[2]):
            assert not patient.done()
            patient.cancel()


async def test_limits_that_are_over_at_once_are_timeouts_too() -> None:
    """uvloop returns an object without a time for a timer that is due at once."""

    async def call_with_no_time_left() -> None:
        async with ScriptedServer(answer(b"one"), answer(b"one"), HALF, HALF) as server:
            await asyncio.gather(server.ask(), server.ask())  # opens connections
            calls = [server.connections.post("/generate", b"{}", 0.0) for _ in range(2)]
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in ended] == [TimeoutError] * 2

    await asyncio.to_thread(lambda: uvloop.run(call_with_no_time_left()))


async def test_what_is_not_http_is_a_connection_error() -> None:
    async with ScriptedServer(b"SSH-2.0-OpenSSH_9.6\r\n", TWO) as server:
        with pytest.raises(ConnectionError, match="does not speak HTTP"):
            await server.ask()
        assert await server.ask() == (200, b"two")


async def test_an_answer_that_might_be_read_in_parts_can_be_read_whole() -> None:
    body = b"x" * 3_000_000  # more than the client buffers
    async with (
        ScriptedServer(answer(body, status=b"500 Broken")) as server,
        server.connections.stream_answer("/generate", b"{}") as failed,
    ):
        await asyncio.sleep(0.1)
        assert failed.status == 500
        assert await asyncio.wait_for(failed.read_body(), PATIENCE_S) == body


async def test_a_long_answer_read_in_parts_comes_whole() -> None:
    body = bytes(range(256)) * 20_000  # more than the client buffers, so the server must wait
    chunks = [body[at : at + 9_000] for at in range(0, len(body), 9_000)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    async with ScriptedServer(head + coded, TWO) as server:
        read = b""
        async with server.connections.stream_answer("/generate", b"{}") as long:
            assert long.status == 200
            while part := await long.read_part():
                read += part
                await asyncio.sleep(0.001)
        assert read == body
        assert await server.ask() == (200, b"two")
        assert server.accepted == 1


async def test_a_server_no_longer_called_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = SGLangClient()

    async def forward(server: ScriptedServer) -> None:
        replica = ReplicaView(0, 1, "serving", server.url)
        assert await calls.generate_raw(replica, REQUEST, PATIENCE_S) == b"two"

    async with ScriptedServer(TWO) as old, ScriptedServer(TWO, TWO) as new:
        await forward(old)
        await forward(new)
        assert old.left == 0
        monkeypatch.setattr(sglang_client, "IDLE_POOL_LIFETIME_S", 0.0)
        async with ScriptedServer(TWO) as third:
            await forward(third)
            await until(lambda: (old.left, new.left) == (1, 1))
            await forward(new)  # as if it were new
            await calls.close()
