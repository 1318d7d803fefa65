"""Discovery of replicas that lack the weights, their retries, and the trainer ranks that send."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from areal_hpc.errors import ClusterError
from areal_hpc.recipe.sections.inference import WeightsConfig
from areal_hpc.rundir.rendezvous import (
    EVALUATION_CELL,
    derive_bearer_key,
    find_endpoint,
    format_cell_name,
    format_control_proxy_name,
    make_client_tls,
)
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.disk import DiskTransport
from areal_hpc.weights.replicas import DiscoveredReplicas, ReplicaKey
from areal_hpc.weights.update import Probe, Transport, UpdateReport
from areal_hpc.wire.http import WireClient
from areal_hpc.wire.replicas import ReplicasOfCell, UpdatePauseStats
from areal_hpc.wire.retry import Backoff
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

_DISCOVERY_WAIT_S = 1.0
"""Time limit of a query to a cell that answered last time."""
_CELL_TIMEOUT_S = 3.0
"""Time limit of a query to a cell that has vanished; discovery does not wait for it."""
_MAX_CONCURRENT_QUERIES = 32
MIN_RETRY_PAUSE_S = 1.0
"""Seconds between two tries to update a replica that failed."""
MAX_RETRY_PAUSE_S = 1800.0
MAX_URGENT_RETRY_PAUSE_S = 30.0


def find_outdated_replicas(
    replicas: DiscoveredReplicas, version: WeightVersion
) -> list[ReplicaKey]:
    """Return the replicas that are up and do not serve `version`. Pure."""
    return [
        key
        for key, view in replicas
        if view.state == "ready" or (view.state == "serving" and view.version != str(version))
    ]


def make_transport(
    config: WeightsConfig,
    service_key: str,
    backend: str,
    device: torch.device,
    weights_dir: Path,
) -> Transport[Any]:
    """Make this rank's end of updates.

    Backend `gloo` reaches replicas on CPUs, `nccl` replicas on GPUs; buckets are packed on
    `device`, which must suit it. `weights_dir`, for `weights.transport=disk`, is a path that cells
    can read.
    """
    if config.transport == "disk":
        return DiskTransport(config, service_key, device, weights_dir)
    return BroadcastTransport(config, service_key, device, backend)


class Publisher:
    """Finder of replicas that lack the current weights, on the trainer's first rank.

    A cell that does not answer delays nothing.

    Args:
        transport: This rank's end of updates; closed with the publisher.
        rendezvous_dir: Folder in which the cells' control proxies publish their endpoints.
        cells: Number of cells in the run, without the evaluation cell.
        evaluation_cell: Whether the run has an evaluation cell.
    """

    def __init__(
        self,
        transport: Transport[Any],
        rendezvous_dir: Path,
        cells: int,
        service_key: str,
        *,
        evaluation_cell: bool = False,
    ) -> None:
        self._rendezvous_dir = rendezvous_dir
        self._cells = [format_cell_name(index) for index in range(cells)]
        self._cells += [EVALUATION_CELL] if evaluation_cell else []
        self._service_key = service_key
        self._client = WireClient("", tls=make_client_tls(service_key), timeout_s=_CELL_TIMEOUT_S)
        self._pool = ThreadPoolExecutor(
            min(_MAX_CONCURRENT_QUERIES, max(1, len(self._cells))), thread_name_prefix="discovery"
        )
        self._queries: dict[str, Future[DiscoveredReplicas | None]] = {}
        self._vanished: set[str] = set()
        self.transport = transport
        self.pauses: list[UpdatePauseStats] = []
        """Cost of each replica's last update, at the last `discover_outdated_training_replicas`."""
        self.replica_count = 0
        """Replicas of training found at that time, in any state."""
        self.evaluation_replicas: DiscoveredReplicas = []
        """Replicas of the evaluation cell at that time; empty if it did not answer."""

    def discover_outdated_training_replicas(self, version: WeightVersion) -> list[ReplicaKey]:
        """Return the replicas of training that are up and do not serve `version`.

        Unreachable cells are left out, and so is the evaluation cell: see `evaluation_replicas`.
        """
        replicas = self.discover_replicas()
        self.evaluation_replicas = [each for each in replicas if each[0].cell == EVALUATION_CELL]
        training = [each for each in replicas if each[0].cell != EVALUATION_CELL]
        self.replica_count = len(training)
        self.pauses = [view.pause for _, view in training if view.pause is not None]
        return find_outdated_replicas(training, version)

    def discover_replicas(self) -> DiscoveredReplicas:
        """Return every replica of the cells that answer; takes a second at most.

        A cell that does not answer is left out, and not waited for again until it has answered.
        """
        for cell in self._cells:
            if cell not in self._queries:
                self._queries[cell] = self._pool.submit(self._fetch_cell_replicas, cell)
        wait(
            [query for cell, query in self._queries.items() if cell not in self._vanished],
            timeout=_DISCOVERY_WAIT_S,
        )
        replicas: DiscoveredReplicas = []
        for cell in self._cells:
            query = self._queries[cell]
            answer = self._queries.pop(cell).result() if query.done() else None
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
        except (OSError, msgspec.DecodeError) as error:  # storage stalls, or is being replaced
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
        control_endpoint = (endpoint.url, endpoint.started_at)
        return [
            (ReplicaKey(cell, view.index, view.incarnation, view.tp, *control_endpoint), view)
            for view in replicas
        ]

    def close(self) -> None:
        self.transport.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()


@dataclass(frozen=True, slots=True)
class _FailureStreak:
    key: ReplicaKey
    """Incarnation that failed last."""
    in_a_row: int
    cost_s: float
    ended_at: float


class UpdateBackoff:
    """Retry times of replicas that failed an update, so that they do not hold up the others.

    The first failure is forgiven: a resend usually repairs it. From the second on, a replica is
    retried after a pause that doubles and that is longer than the failed try took, so that
    tries take a shrinking share of the time. A restarted replica gets a shorter pause.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[str, int], _FailureStreak] = {}

    def filter_retryable(
        self, keys: Iterable[ReplicaKey], now: float, *, is_urgent: bool = False
    ) -> list[ReplicaKey]:
        """Return the keys that may be retried at `now`, a time of `time.monotonic`.

        `is_urgent`: no replica has the weights, so a retry holds up nothing.
        """
        longest_s = MAX_URGENT_RETRY_PAUSE_S if is_urgent else MAX_RETRY_PAUSE_S
        return [key for key in keys if now >= self._get_retry_time(key, longest_s)]

    def record_update(
        self, ok: Iterable[ReplicaKey], failed: Iterable[ReplicaKey], now: float, cost_s: float
    ) -> None:
        """Record an update that took `cost_s` seconds and ended at `now`."""
        for key in ok:
            self._failures.pop(key.cell_and_index, None)
        for key in failed:
            past = self._failures.get(key.cell_and_index)
            in_a_row = past.in_a_row + 1 if past else 1
            self._failures[key.cell_and_index] = _FailureStreak(key, in_a_row, cost_s, now)

    def _get_retry_time(self, key: ReplicaKey, longest_s: float) -> float:
        past = self._failures.get(key.cell_and_index)
        if past is None:
            return 0.0
        is_costly = past.in_a_row > 1 and key == past.key
        first_s = max(past.cost_s, MIN_RETRY_PAUSE_S) if is_costly else MIN_RETRY_PAUSE_S
        return past.ended_at + Backoff(first_s, longest_s).get_pause_s(past.in_a_row - 1)


ReplicasBySender = list[list[ReplicaKey]]
"""Replicas of an update by sender; a sender may have none."""
_Outcome = tuple[list[ReplicaKey], list[tuple[ReplicaKey, str]], dict[str, float]]
"""Fields of an `UpdateReport` in JSON, without its version."""


def choose_sender_ranks(node_of_rank: Sequence[int], config: WeightsConfig) -> list[int]:
    """Choose the trainer ranks that send, rank 0 first: the first of each node, then the second.

    `weights.senders` sets the number, by default one per trainer node. Rank 0 alone writes files.
    """
    if config.goes_by_files:
        return [0]
    ranks_on_node: Counter[int] = Counter()
    order: list[tuple[int, int]] = []
    for rank, node in enumerate(node_of_rank):
        order.append((ranks_on_node[node], rank))
        ranks_on_node[node] += 1
    return [rank for _, rank in sorted(order)[: config.senders or len(ranks_on_node)]]


class WeightSenders:
    """This rank's part in updates that several trainer ranks send.

    All ranks gather parameters together and so stay in step. Each sender has its own update groups,
    so a receiver that fails costs those of other senders no more than a wait.

    Args:
        sender_index: This rank's index among the senders, 0 on rank 0; None if it sends nothing.
        senders: Number of senders.
        specs: Parameters that an update sends.
        transport: This rank's end of updates; None if it sends nothing.
        gather: Returns the messages of all ranks on rank 0, decoded as a type. A collective.
    """

    def __init__(
        self,
        sender_index: int | None,
        senders: int,
        specs: Sequence[TensorSpec],
        transport: Transport[Any] | None,
        gather: Callable[[object, Any], list[Any]],
    ) -> None:
        self._sender_index = sender_index
        self._senders = senders
        self._specs = specs
        self._transport = transport
        self._gather = gather
        self._sender_of: dict[tuple[str, int], int] = {}

    def assign(self, replicas: Sequence[ReplicaKey]) -> ReplicasBySender:
        """Divide the replicas of an update over senders.

        A replica keeps its sender, which holds the process group with it. A new one goes to the
        sender with the fewest replicas.
        """
        shares: ReplicasBySender = [[] for _ in range(self._senders)]
        for key in sorted(replicas, key=lambda key: key.cell_and_index):
            if key.cell_and_index not in self._sender_of:
                replica_counts = Counter(self._sender_of.values())
                fewest = min(range(self._senders), key=lambda sender: replica_counts[sender])
                self._sender_of[key.cell_and_index] = fewest
            shares[self._sender_of[key.cell_and_index]].append(key)
        return shares

    def send(
        self,
        version: WeightVersion,
        replicas_by_sender: ReplicasBySender,
        parameters: Iterable[tuple[str, torch.Tensor]],
        probe: Probe,
    ) -> UpdateReport:
        """Send each share from its rank; see `Transport.update`. A collective.

        Returns:
            On rank 0 the outcome at all replicas, elsewhere at the replicas of this rank.
        """
        report, sender = UpdateReport(version, (), {}), self._sender_index
        if sender is not None and self._transport is not None and replicas_by_sender[sender]:
            report = self._transport.update(
                version, self._specs, parameters, replicas_by_sender[sender], probe
            )
        for _ in parameters:  # every rank must exhaust them: exporting is a collective
            pass
        if not any(replicas_by_sender[1:]):
            return report
        outcome = report.ok, [*report.failed.items()], report.seconds
        outcomes: list[_Outcome] = self._gather(outcome, _Outcome)
        if not outcomes:
            return report
        ok_by_sender, failed_by_sender, seconds = zip(*outcomes, strict=True)
        phases = dict.fromkeys(phase for phase_seconds in seconds for phase in phase_seconds)
        return UpdateReport(
            version,
            ok=tuple(key for keys in ok_by_sender for key in keys),
            failed=dict(failure for failures in failed_by_sender for failure in failures),
            seconds={phase: max(times.get(phase, 0.0) for times in seconds) for phase in phases},
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
