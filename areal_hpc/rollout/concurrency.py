"""Concurrency of a cell's episodes that follows its SGLang servers.

The number of slots grows by a ticket's episodes while all slots are used and no request waits, and
shrinks by a quarter when requests have waited for a while: additive increase, multiplicative
decrease. SGLang puts a request that it preempts for want of memory back into the same queue.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Struct

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.rendezvous import format_control_proxy_name
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.wire.http import AsyncWireClient
from areal_hpc.wire.replicas import ReplicasOfCell

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 2.0
LOOKS_BEFORE_DECREASE = 3
"""Looks in a row that must find waiting requests: each start of a batch makes some wait."""
DECREASE_FACTOR = 0.75
MAX_CACHE_SHARE = 0.9
"""Share of the KV cache in use above which the number of slots does not grow."""


class EngineLoad(Struct):
    """Load of all servers of a cell."""

    waiting_requests: int
    cache_share: float
    """Share of the KV cache in use, of the server with the highest."""


class _RankLoad(Struct):
    num_waiting_reqs: int = 0
    token_usage: float = 0.0


class _ServerLoads(Struct):
    """Reply of SGLang's `/v1/loads`."""

    loads: list[_RankLoad]


class EngineLoadReader:
    """Reader of the load of a cell's servers, on their node."""

    def __init__(self, rendezvous_dir: Path, cell: str, service_key: str) -> None:
        name = format_control_proxy_name(cell)
        self._control_proxy = AsyncServiceClient(rendezvous_dir, name, service_key)
        self._servers = AsyncWireClient("", timeout_s=LOAD_TIMEOUT_S)

    async def read(self) -> EngineLoad | None:
        """Read the load; None while a server does not serve or does not answer."""
        try:
            cell = await self._control_proxy.call("/replicas", None, ReplicasOfCell)
            if any(replica.state != "serving" for replica in cell.replicas):
                return None
            loads: list[_RankLoad] = []
            for replica in cell.replicas:
                url, key = f"{replica.url}/v1/loads?include=core", replica.keys.api
                loads += (await self._servers.call(url, None, _ServerLoads, key=key)).loads
        except (ClusterError, OSError) as error:
            log.debug("the load of the servers is not known: %s", error)
            return None
        return EngineLoad(
            sum(load.num_waiting_reqs for load in loads),
            max((load.token_usage for load in loads), default=0.0),
        )

    async def close(self) -> None:
        await self._control_proxy.close()
        await self._servers.close()


class AdaptiveSlots:
    """Number of episode slots between a floor, at which it begins, and a ceiling."""

    def __init__(
        self,
        read_load: Callable[[], Awaitable[EngineLoad | None]],
        *,
        floor: int,
        ceiling: int,
        increase: int,
    ) -> None:
        self._read_load = read_load
        self._floor, self._ceiling, self._increase = min(floor, ceiling), ceiling, increase
        self._crowded_looks = 0
        self.count = self._floor

    async def look(self, open_episodes: int) -> int:
        """Look at the load that `open_episodes` make, and return the number of slots."""
        if (load := await self._read_load()) is not None:
            self.adapt_count(load, open_episodes)
        return self.count

    def adapt_count(self, load: EngineLoad, open_episodes: int) -> None:
        # With more episodes than slots, an earlier decrease has yet to show.
        is_crowded = load.waiting_requests > 0 and open_episodes <= self.count
        self._crowded_looks = self._crowded_looks + 1 if is_crowded else 0
        if self._crowded_looks >= LOOKS_BEFORE_DECREASE:
            self.count = max(self._floor, int(self.count * DECREASE_FACTOR))
            self._crowded_looks = 0
        is_full = open_episodes + self._increase > self.count
        if is_full and not load.waiting_requests and load.cache_share <= MAX_CACHE_SHARE:
            self.count = min(self._ceiling, self.count + self._increase)
