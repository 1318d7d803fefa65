"""Load for an HTTP server: conversations over kept connections, each call timed."""

import asyncio
import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import psutil


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def request(self, path: str, body: bytes, key: str) -> bytes:
        """A whole POST, as it goes over the wire."""
        return (
            f"POST {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\naccept: application/json\r\n"
            f"content-type: application/json\r\nuser-agent: bench\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body


class _Connection(asyncio.Protocol):
    """One call at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._whole_bytes = 0
        self._answered: asyncio.Future[bytes] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is none

    async def call(self, request: bytes) -> bytes:
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._whole_bytes:
            head, separator, _ = self._received.partition(b"\r\n\r\n")
            if not separator:
                return
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            self._whole_bytes = len(head) + 4 + length
        if len(self._received) >= self._whole_bytes and self._answered is not None:
            answer, self._received, self._whole_bytes = bytes(self._received), bytearray(), 0
            answered, self._answered = self._answered, None
            if answer[9:12] == b"200":
                answered.set_result(answer.partition(b"\r\n\r\n")[2])
            else:
                answered.set_exception(RuntimeError(answer[:600].decode()))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None:
            self._answered.set_exception(RuntimeError(f"the connection was lost: {exc}"))


@dataclass(frozen=True, slots=True)
class LoadResult:
    answers: list[list[bytes]]
    """Bodies, by conversation and turn."""
    latencies_s: list[float]


async def load(
    address: Address, conversations: Sequence[Sequence[bytes]], concurrency: int
) -> LoadResult:
    """Play so many conversations at once; the turns of each follow one another."""
    answers: list[list[bytes]] = [[] for _ in conversations]
    latencies_s: list[float] = []
    waiting = iter(range(len(conversations)))

    async def play() -> None:
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(
            _Connection, address.host, address.port
        )
        for number in waiting:
            for request in conversations[number]:
                began = time.perf_counter()
                answers[number].append(await connection.call(request))
                latencies_s.append(time.perf_counter() - began)
        transport.close()

    async with asyncio.TaskGroup() as players:
        for _ in range(min(concurrency, len(conversations))):
            players.create_task(play())
    return LoadResult(answers, latencies_s)


_clock_of_process = ctypes.CDLL(None).clock_getcpuclockid


def cpu_s(pid: int) -> float:
    """CPU time of a process, its threads and its living children, user and system, in seconds."""
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return sum(_own_cpu_s(member) for member in family)


def _own_cpu_s(pid: int) -> float:
    clock = ctypes.c_int()
    error = _clock_of_process(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, os.strerror(error), str(pid))
    return time.clock_gettime(clock.value)
