"""Pool of worker processes, started when they are needed and used again by one after the other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar


class PooledWorker(Protocol):
    """What a pool asks of its workers."""

    @property
    def is_usable(self) -> bool:
        """It lives, nobody waits for its answer, and it had what it needed for the last one."""

    def close(self) -> None:
        """End it, whatever it does: in a thread, for a process may take its time to be gone."""


Worker = TypeVar("Worker", bound=PooledWorker)


class WorkerPool(Generic[Worker]):
    """At most `size` workers. It may serve one event loop after another.

    Args:
        size: Workers that may be in use at a time.
        start: Starts a worker.
    """

    def __init__(self, size: int, start: Callable[[], Awaitable[Worker]]) -> None:
        self._size, self._start = size, start
        self._idle: list[Worker] = []
        self._places = asyncio.Semaphore(size)
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Worker]:
        """A worker to oneself; waits while all are in use. One left unusable is ended."""
        async with self._get_places_of_running_loop():
            worker = await self._take_idle_or_start()
            try:
                yield worker
            finally:
                if worker.is_usable:
                    self._idle.append(worker)
                else:
                    await asyncio.to_thread(worker.close)

    def close_idle_workers(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _get_places_of_running_loop(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._places, self._loop = asyncio.Semaphore(self._size), loop
        return self._places

    async def _take_idle_or_start(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_usable:
                return worker
            await asyncio.to_thread(worker.close)
        return await self._start()
