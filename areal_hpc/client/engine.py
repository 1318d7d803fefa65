"""In-process engine: the SGLang endpoint that a client generates with."""

from __future__ import annotations

import asyncio

from areal_hpc.proxy.engine.replicas import StaticReplicaSource
from areal_hpc.proxy.engine.router import Router
from areal_hpc.proxy.engine.sglang_client import SGLangClient
from areal_hpc.wire.proxy import EngineAddress
from areal_hpc.wire.replicas import ReplicaView


class EngineEndpoint:
    """A server that answers SGLang's `/generate`: SGLang itself, or a proxy's session.

    May be shared by many clients; they use one connection pool.
    """

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._upstream: SGLangClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def at(cls, place: EngineEndpoint | EngineAddress | str) -> EngineEndpoint:
        """The engine itself, or one for an address."""
        if isinstance(place, EngineEndpoint):
            return place
        if isinstance(place, str):
            return cls(place)
        return cls(place.url, api_key=place.api_key)

    def upstream(self) -> SGLangClient:
        """The connection pool of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._upstream is None or self._loop is not loop:
            self._upstream, self._loop = SGLangClient(self._api_key), loop
        return self._upstream

    async def close(self) -> None:
        """Close pooled connections."""
        if self._upstream is not None and self._loop is asyncio.get_running_loop():
            await self._upstream.close()
            self._upstream = None


class SingleServerRouter(Router):
    """Always the same server: there is no other to go to."""

    def __init__(self, url: str) -> None:
        super().__init__(StaticReplicaSource([url]))
        self._serving = {0: ReplicaView(0, 1, "serving", url)}

    def lost(self, replica: ReplicaView) -> None:
        """Stay: the call is repeated until its time is up."""
