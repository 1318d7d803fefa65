"""Replica list of the cell's control proxy, or of the command line."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from areal_hpc.rundir.rendezvous import format_control_proxy_name
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaView

CONTROL_PROXY_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 5.0


class ReplicaSource(Protocol):
    async def fetch_replicas(self) -> list[ReplicaView]:
        """The replicas as they are now."""

    async def close(self) -> None:
        pass


class CellReplicaSource:
    """The replicas of a cell, as its control proxy knows them."""

    def __init__(self, rendezvous_dir: Path, cell: str, service_key: str) -> None:
        name = format_control_proxy_name(cell)
        self._client = AsyncServiceClient(
            rendezvous_dir, name, service_key, timeout_s=CONTROL_PROXY_TIMEOUT_S
        )

    async def fetch_replicas(self) -> list[ReplicaView]:
        return (await self._client.call("/replicas", None, ReplicasOfCell)).replicas

    async def close(self) -> None:
        await self._client.close()


class _ServedModelInfo(msgspec.Struct):
    weight_version: str = ""


class StaticReplicaSource:
    """Servers by address. One serves while `/ready` does not deny it.

    SGLang answers that route at once, with 503 while it starts or is paused; a server that does
    not know the route is taken to be ready once it answers at all.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._http: aiohttp.ClientSession | None = None

    async def fetch_replicas(self) -> list[ReplicaView]:
        """All of them, asked at the same time."""
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            self._http = aiohttp.ClientSession(timeout=timeout)
        views = (self._probe_server(self._http, index, url) for index, url in enumerate(self._urls))
        return list(await asyncio.gather(*views))

    async def _probe_server(self, http: aiohttp.ClientSession, index: int, url: str) -> ReplicaView:
        try:
            async with http.get(f"{url}/ready") as answer:
                if answer.status >= 500:
                    return ReplicaView(index, 1, "starting", url)
            async with http.get(f"{url}/model_info") as answer:
                info = await answer.read() if answer.status == 200 else b"{}"
        except (aiohttp.ClientError, OSError):
            return ReplicaView(index, 1, "failed", url)
        try:
            version = msgspec.json.decode(info, type=_ServedModelInfo).weight_version
        except msgspec.DecodeError:
            version = ""  # it does not say: no reply that it began can be gone on with
        return ReplicaView(index, 1, "serving", url, version)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None
