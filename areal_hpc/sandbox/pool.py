"""Pool of warm sandboxes: started before they are wanted, used once."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.runtimes import Runtime
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.sandbox.spec import SandboxSpec

log = logging.getLogger(__name__)

START_TRIES = 3
"""A loaded node may fail to start one."""
RETRY_PAUSE_S = 1.0


class SandboxPool:
    """Keeps `size` sandboxes ready, all alike."""

    def __init__(self, runtime: Runtime, spec: SandboxSpec, size: int) -> None:
        self._runtime, self._spec, self._size = runtime, spec, size
        self._warm: deque[Sandbox] = deque()
        self._filler: asyncio.Task[None] | None = None

    async def fill(self) -> None:
        """Start the first of them, so that what is wrong is known; the others follow."""
        self._warm.append(await self._start_sandbox_with_retries())
        self._begin_refill()

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox to oneself; it is stopped in the end. One unlike the others is started now."""
        is_like_others = spec is None or spec == self._spec
        sandbox = await (
            self._take_warm() if is_like_others else self._start_sandbox_with_retries(spec)
        )
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    async def close(self) -> None:
        self._size = 0
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.wait({self._filler})
        while self._warm:
            await self._warm.popleft().stop()

    async def _take_warm(self) -> Sandbox:
        while self._warm:
            sandbox = self._warm.popleft()
            self._begin_refill()
            if sandbox.is_alive:
                return sandbox
            await sandbox.stop()
        self._begin_refill()
        return await self._start_sandbox_with_retries()

    async def _start_sandbox_with_retries(self, spec: SandboxSpec | None = None) -> Sandbox:
        for left in reversed(range(START_TRIES)):
            try:
                return await self._runtime.start(spec or self._spec)
            except ClusterError as error:
                if not left:
                    raise
                log.warning("a sandbox did not start, %d tries left: %s", left, error)
            await asyncio.sleep(RETRY_PAUSE_S)
        raise AssertionError

    def _begin_refill(self) -> None:
        if self._filler is None or self._filler.done():
            self._filler = asyncio.create_task(self._start_missing())

    async def _start_missing(self) -> None:
        while len(self._warm) < self._size:
            try:
                self._warm.append(await self._runtime.start(self._spec))
            except (ClusterError, RecipeError) as error:  # who takes one meets it too
                log.warning("a warm sandbox did not start: %s", error)
                return
