"""Discovery of replicas through the cells' control proxies, and the keys of those found."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.rendezvous import (
    EVALUATION_CELL,
    find_endpoint,
    format_cell_name,
    format_control_proxy_name,
)
from areal_hpc.wire.http import WireClient
from areal_hpc.wire.replicas import ReplicasOfCell, ReplicaView
from areal_hpc.wire.service_key import derive_bearer_key, make_client_tls

log = logging.getLogger(__name__)

_DISCOVERY_WAIT_S = 1.0
"""Time limit of a cell that answered last time."""
_CELL_TIMEOUT_S = 3.0
"""Time limit of a cell that has vanished, while nobody waits."""
_MAX_CONCURRENT_QUERIES = 32


@dataclass(frozen=True, slots=True)
class ReplicaKey:
    """One start of one SGLang server. A restarted server, or control proxy, has another key."""

    cell: str
    index: int
    incarnation: int
    tp: int
    """Ranks it brings into an update group."""
    control_url: str
    control_started_at: float

    @property
    def cell_and_index(self) -> tuple[str, int]:
        return self.cell, self.index

    def __str__(self) -> str:
        return f"replica {self.index} of {self.cell} (incarnation {self.incarnation})"


DiscoveredReplicas = list[tuple[ReplicaKey, ReplicaView]]


class ReplicaDiscovery:
    """Asks control proxies without letting one that has vanished delay its caller."""

    def __init__(
        self, rendezvous_dir: Path, cells: int, service_key: str, *, evaluation_cell: bool = False
    ) -> None:
        self._rendezvous_dir = rendezvous_dir
        self._cells = [format_cell_name(index) for index in range(cells)]
        self._cells += [EVALUATION_CELL] if evaluation_cell else []
        self._service_key = service_key
        self._client = WireClient("", tls=make_client_tls(service_key), timeout_s=_CELL_TIMEOUT_S)
        self._pool = ThreadPoolExecutor(
            min(_MAX_CONCURRENT_QUERIES, max(1, len(self._cells))), thread_name_prefix="discovery"
        )
        self._questions: dict[str, Future[DiscoveredReplicas | None]] = {}
        self._vanished: set[str] = set()

    def discover(self) -> DiscoveredReplicas:
        """Every replica of the cells that answer; takes a second at most.

        A cell that does not answer is left out, and not waited for again until it has.
        """
        for cell in self._cells:
            if cell not in self._questions:
                self._questions[cell] = self._pool.submit(self._fetch_cell_replicas, cell)
        wait(
            [asked for cell, asked in self._questions.items() if cell not in self._vanished],
            timeout=_DISCOVERY_WAIT_S,
        )
        replicas: DiscoveredReplicas = []
        for cell in self._cells:
            asked = self._questions[cell]
            answer = self._questions.pop(cell).result() if asked.done() else None
            replicas += answer or []
            if answer is not None and cell in self._vanished:
                log.info("%s answers again", cell)
                self._vanished.remove(cell)
            elif answer is None and cell not in self._vanished:
                log.warning("%s does not respond; it receives no weights until it does", cell)
                self._vanished.add(cell)
        return replicas

    def _fetch_cell_replicas(self, cell: str) -> DiscoveredReplicas | None:
        service = format_control_proxy_name(cell)
        try:
            endpoint = find_endpoint(self._rendezvous_dir, service)
        except (OSError, msgspec.DecodeError) as error:  # storage that stalls, or is being replaced
            log.info("cannot look for %s: %s", cell, error)
            return None
        if endpoint is None:
            return []
        try:
            url, key = f"{endpoint.url}/replicas", derive_bearer_key(self._service_key, service)
            replicas = self._client.call(url, None, ReplicasOfCell, key=key).replicas
        except ClusterError as error:
            log.info("skipping %s: %s", cell, error)
            return None
        place = (endpoint.url, endpoint.started_at)
        return [
            (ReplicaKey(cell, view.index, view.incarnation, view.tp, *place), view)
            for view in replicas
        ]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()
