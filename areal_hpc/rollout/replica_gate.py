"""Gate that holds a cell's episodes back while none of its replicas serves."""

import asyncio
from collections.abc import Callable

from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.wire.proxy import ProxyHealth

CLOSED_GATE_POLL_S = 0.25
"""Between two questions to the proxy while no replica serves. An open gate asks nothing."""


class ReplicaGate:
    """Closed until the proxy says that a replica serves, and again when an episode found none.

    `on_open` is called each time it opens.
    """

    def __init__(self, proxy: AsyncServiceClient, on_open: Callable[[], None]) -> None:
        self._proxy, self._on_open = proxy, on_open
        self._opened, self._closed = asyncio.Event(), asyncio.Event()
        self._closed.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close_until_replica_serves(self) -> None:
        self._opened.clear()
        self._closed.set()

    async def wait_until_open(self) -> None:
        await self._opened.wait()

    async def run(self) -> None:
        """Ask the proxy whenever the gate is closed, until cancelled."""
        while True:
            await self._closed.wait()
            health = await self._proxy.call_until_answered("/healthz", None, ProxyHealth)
            if health.replicas_serving:
                self._closed.clear()
                self._opened.set()
                self._on_open()
            else:
                await asyncio.sleep(CLOSED_GATE_POLL_S)
