"""Router of model calls to replicas: their sources, and the choice of a replica per session."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from areal_hpc.errors import ClusterError, ProxyRequestError
from areal_hpc.proxy.engine.generation import EngineResponseError, UnfinishedEngineCallError
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.rundir.rendezvous import format_control_proxy_name
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.session.tree import VersionSpan
from areal_hpc.wire.decoding import decode_json
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

CONTROL_PROXY_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 5.0


class ReplicaSource(Protocol):
    async def fetch_replicas(self) -> list[ReplicaView]:
        pass

    async def close(self) -> None:
        pass


class CellReplicaSource:
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
    """Source of servers given by address. A server serves if `/ready` gives no status from 500 on.

    SGLang answers that route at once, with 503 while it starts or is paused. A server without the
    route counts as ready once it answers at all.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._http: aiohttp.ClientSession | None = None

    async def fetch_replicas(self) -> list[ReplicaView]:
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
            version = decode_json(info, _ServedModelInfo).weight_version
        except msgspec.DecodeError:
            version = ""  # unknown: no other replica can continue a reply of this one
        return ReplicaView(index, 1, "serving", url, version)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None


log = logging.getLogger(__name__)

REPLICA_POLL_S = 1.0
NO_REPLICA_POLL_S = 0.2
SESSION_HOME_LIFETIME_S = 60.0
MAX_LOAD_RATIO = 1.2
"""Highest load of the replica that a session prefers, as a multiple of the least load."""
OWN_CACHE_WEIGHT = 1_000_000
"""Weight of a session's own past, against 1 for each session of the same ticket."""


def pack_weight_version(version: str) -> int:
    """Return SGLang's weight version as an integer; 0 for weights without a version."""
    try:
        return WeightVersion.parse(version).packed
    except ValueError:
        return 0


@dataclass(slots=True)
class _SessionHome:
    index: int
    used_at: float = 0.0


def choose_home_replica(
    replicas: Sequence[int], load: Mapping[int, int], affinity_by_replica: Mapping[int, int]
) -> int:
    """Return the replica of the highest affinity, or if it has a high load the least loaded one."""
    least = min(replicas, key=lambda index: (load.get(index, 0), index))
    closest = max(replicas, key=lambda index: (affinity_by_replica.get(index, 0), -index))
    is_even = load.get(closest, 0) <= MAX_LOAD_RATIO * load.get(least, 0)
    return closest if is_even and affinity_by_replica.get(closest, 0) else least


class Router:
    """Router that keeps each session at one replica, whose cache has its prompts."""

    def __init__(self, replica_source: ReplicaSource) -> None:
        self._source = replica_source
        self._serving: dict[int, ReplicaView] = {}
        self._homes: WeakKeyDictionary[Session, _SessionHome] = WeakKeyDictionary()
        """Replica of each session that the store still has."""
        self._in_flight: Counter[int] = Counter()
        self._refreshed = asyncio.Event()
        self._refresh_now = asyncio.Event()
        self.newest_version = 0
        """Packed version of the newest weights that any replica has served or sampled from."""

    @property
    def serving_count(self) -> int:
        return len(self._serving)

    async def poll_replicas(self) -> None:
        while True:
            self._refresh_now.clear()
            await self._refresh_replicas()
            self._refreshed.set()
            self._refreshed = asyncio.Event()
            pause_s = REPLICA_POLL_S if self._serving else NO_REPLICA_POLL_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._refresh_now.wait(), pause_s)

    async def _refresh_replicas(self) -> None:
        try:
            replicas = await self._source.fetch_replicas()
        except ClusterError as error:
            log.debug("the control proxy does not answer: %s", error)
            replicas = []  # its SGLang servers die with it
        except OSError as error:  # too many open files, or stalled storage: the state is unknown
            log.warning("cannot look for replicas: %s", error)
            return
        serving = {replica.index: replica for replica in replicas if replica.state == "serving"}
        if serving.keys() != self._serving.keys():
            log.info("replicas serving: %s", sorted(serving) or "none")
        self._serving = serving
        for replica in serving.values():
            version = pack_weight_version(replica.version)
            self.newest_version = max(self.newest_version, version)

    def note_sampled_versions(self, spans: Iterable[VersionSpan]) -> None:
        for span in spans:
            self.newest_version = max(self.newest_version, span.version)

    async def pick_replica(
        self, session: Session, give_up_at: float, avoided_replicas: Container[int] = ()
    ) -> ReplicaView:
        """Return the session's replica, or another if that one no longer serves; wait for one.

        A session that was idle for long may change its replica: the cache has little of it left.
        Replicas in `avoided_replicas`, by index, lost the call before, and are the last choice.
        """
        while not self._serving:
            remaining_s = give_up_at - time.monotonic()
            if remaining_s <= 0:
                raise ProxyRequestError(503, "no replica is available")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._refreshed.wait(), remaining_s)
        home, now = self._homes.get(session), time.monotonic()
        if (
            home is None
            or home.index in avoided_replicas
            or home.index not in self._serving
            or now - home.used_at > SESSION_HOME_LIFETIME_S
        ):
            others = [index for index in self._serving if index not in avoided_replicas]
            home = _SessionHome(self._choose_home(session, others or [*self._serving]))
            self._homes[session] = home
        home.used_at = now
        return self._serving[home.index]

    def _choose_home(self, session: Session, replicas: Sequence[int]) -> int:
        """Choose the replica of a session, by index.

        Open sessions count as load, not only calls in flight: otherwise sessions whose short first
        calls come one after the other would all choose the same idle replica.
        """
        if len(replicas) == 1:
            return replicas[0]
        load, affinity = Counter(self._in_flight), Counter[int]()
        ticket = session.request.ref
        for other, home in self._homes.items():
            if other is session:
                affinity[home.index] += OWN_CACHE_WEIGHT
            elif not other.ended:
                load[home.index] += 1
                affinity[home.index] += ticket is not None and other.request.ref == ticket
        return choose_home_replica(replicas, load, affinity)

    def on_call_started(self, replica: ReplicaView) -> None:
        self._in_flight[replica.index] += 1

    def on_call_finished(self, session: Session, replica: ReplicaView) -> None:
        self._in_flight[replica.index] -= 1
        if home := self._homes.get(session):
            home.used_at = time.monotonic()

    def on_call_lost(self, replica: ReplicaView, error: UnfinishedEngineCallError) -> None:
        """Route nothing to the replica until its source reports that it serves again.

        A replica that responded with an error keeps other sessions while its source reports it.
        """
        current = self._serving.get(replica.index)
        is_same = current is not None and current.incarnation == replica.incarnation
        if is_same and not isinstance(error, EngineResponseError):
            del self._serving[replica.index]
        self._refresh_now.set()

    async def close(self) -> None:
        await self._source.close()
