"""Connections to SGLang are kept, and every way in which a call ends early has its name."""

import asyncio
import contextlib
import gc
from typing import Any, Self

import pytest

from areal_hpc.proxy import upstream
from areal_hpc.proxy.generation import UpstreamLost
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.upstream import Upstream

MAX_WAIT_S = 30.0
"""What does not happen in such a time never will."""


class ScriptedServer:
    """Answers each request with the next script; an empty one is never answered."""

    def __init__(self, *scripts: bytes) -> None:
        self._scripts = iter(scripts)
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.accepted = 0
        self.left = 0
        self._serving: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/sub"
        self.calls = Upstream("secret")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.calls.close()
        self._server.close()
        await asyncio.wait_for(asyncio.gather(*self._serving), MAX_WAIT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._serving.add(asyncio.current_task())  # type: ignore[arg-type]  # it runs
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                self.heads.append(head)
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                aborts = head.startswith("post /sub/abort_request ")
                writer.write(answer(b"{}") if aborts else next(self._scripts))
                await writer.drain()
        self.left += 1
        writer.close()

    async def ask(self, body: bytes = b"{}", timeout_s: float = MAX_WAIT_S) -> bytes:
        return await self.calls.relay(self.url, "r1", body, timeout_s)


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def test_one_connection_carries_calls_that_come_after_one_another() -> None:
    async def run() -> None:
        async with ScriptedServer(answer(b"one"), answer(b"two")) as server:
            assert await server.ask(b'{"a":1}') == b"one"
            assert await server.ask(b"x" * 300_000) == b"two"
            assert server.accepted == 1
            assert server.bodies == [b'{"a":1}', b"x" * 300_000]
            assert server.heads[0].startswith("post /sub/generate http/1.1")
            assert "authorization: bearer secret" in server.heads[0]

    asyncio.run(run())


def test_any_number_of_calls_is_under_way_at_once() -> None:
    async def run() -> None:
        async with ScriptedServer(*[b""] * 200) as server:
            calls = [asyncio.ensure_future(server.ask()) for _ in range(200)]
            async with asyncio.timeout(MAX_WAIT_S):
                while len(server.bodies) < len(calls):
                    await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

    asyncio.run(run())


@pytest.mark.parametrize("script", [answer(b"x" * 100)[:-50], b""], ids=["half", "nothing"])
def test_a_call_out_of_time_is_aborted_and_its_connection_is_not_used_again(script: bytes) -> None:
    async def run() -> None:
        async with ScriptedServer(script, answer(b"two")) as server:
            with pytest.raises(RequestRefused) as refused:
                await server.ask(timeout_s=0.1)
            assert refused.value.status == 504
            assert await server.ask() == b"two"
            assert b'{"rid":"r1"}' in server.bodies
            assert server.accepted >= 2

    asyncio.run(run())


def test_what_is_not_http_is_a_lost_server() -> None:
    async def run() -> None:
        async with ScriptedServer(b"SSH-2.0-OpenSSH_9.6\r\n", answer(b"two")) as server:
            with pytest.raises(UpstreamLost):
                await server.ask()
            assert await server.ask() == b"two"

    asyncio.run(run())


def test_a_client_that_is_dropped_hangs_up_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with ScriptedServer(answer(b"one"), answer(b"two")) as server:
            server.calls = Upstream()
            assert await server.ask() == b"one"
            server.calls = Upstream()
            gc.collect()
            async with asyncio.timeout(MAX_WAIT_S):
                while server.left == 0:
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    assert caplog.messages == []


def test_a_server_that_does_not_accept_in_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(upstream, "CONNECT_TIMEOUT_S", 0.2)
        calls = Upstream()
        with pytest.raises(UpstreamLost):  # TEST-NET-1: nobody answers, or there is no route
            await calls.relay("http://192.0.2.1:9", "r1", b"{}", MAX_WAIT_S)
        await calls.close()

    asyncio.run(run())
