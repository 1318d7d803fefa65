"""Replicas that lack the weights, when they are tried again, and the trainer ranks that send."""

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
"""Time limit of a cell that answered last time."""
_CELL_TIMEOUT_S = 3.0
"""Time limit of a cell that has vanished, while nobody waits."""
_MAX_CONCURRENT_QUERIES = 32
MIN_RETRY_PAUSE_S = 1.0
"""Between two tries to update a replica that failed."""
MAX_RETRY_PAUSE_S = 1800.0
MAX_URGENT_RETRY_PAUSE_S = 30.0


def find_outdated_replicas(
    replicas: DiscoveredReplicas, version: WeightVersion
) -> list[ReplicaKey]:
    """The replicas that are up and do not serve `version`. Pure."""
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

    Backend `gloo` reaches replicas on CPUs, `nccl` replicas on GPUs; `device`, where buckets are
    packed, must suit it. `weights_dir`, for `weights.transport=disk`, is where the cells see it.
    """
    if config.transport == "disk":
        return DiskTransport(config, service_key, device, weights_dir)
    return BroadcastTransport(config, service_key, device, backend)


class Publisher:
    """Finds replicas that lack the current weights, and reaches them from the trainer's first rank.

    A cell that does not answer delays nobody.

    Args:
        transport: This rank's end of updates; closed with the publisher.
        rendezvous_dir: Where the cells' control proxies are published.
        cells: How many cells the run has, that of evaluation not counted.
        evaluation_cell: The run has one.
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
        self._questions: dict[str, Future[DiscoveredReplicas | None]] = {}
        self._vanished: set[str] = set()
        self.transport = transport
        self.pauses: list[UpdatePauseStats] = []
        """Cost of each replica's last update, as of `discover_outdated_training_replicas`."""
        self.replica_count = 0
        """Replicas of training that were found then, whatever they do."""
        self.evaluation_replicas: DiscoveredReplicas = []
        """Those of the evaluation cell as they were then; none when it did not answer."""

    def discover_outdated_training_replicas(self, version: WeightVersion) -> list[ReplicaKey]:
        """Replicas of training that are up and do not serve `version`.

        Unreachable cells are left out, and so is that of evaluation: `evaluation_replicas` has it.
        """
        replicas = self.discover_replicas()
        self.evaluation_replicas = [one for one in replicas if one[0].cell == EVALUATION_CELL]
        training = [one for one in replicas if one[0].cell != EVALUATION_CELL]
        self.replica_count = len(training)
        self.pauses = [view.pause for _, view in training if view.pause is not None]
        return find_outdated_replicas(training, version)

    def discover_replicas(self) -> DiscoveredReplicas:
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
        self.transport.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()


@dataclass(frozen=True, slots=True)
class _FailureStreak:
    key: ReplicaKey
    """The incarnation that failed last."""
    in_a_row: int
    cost_s: float
    ended_at: float


class UpdateBackoff:
    """Keeps replicas that cannot be updated from stopping those that can, and the training.

    The first failure is forgiven: a resend usually fixes it. From the second on, a replica is
    tried again after a pause that doubles, and that is longer than the failed try took, so
    that tries take a shrinking share of the time. A restarted one has a shorter pause: it may
    be well.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[str, int], _FailureStreak] = {}

    def filter_retryable(
        self, keys: Iterable[ReplicaKey], now: float, *, is_urgent: bool = False
    ) -> list[ReplicaKey]:
        """Those of `keys` that may be tried at `now`, a time of `time.monotonic`.

        `is_urgent`: no replica has the weights, so there is nothing that a try would hold up.
        """
        longest_s = MAX_URGENT_RETRY_PAUSE_S if is_urgent else MAX_RETRY_PAUSE_S
        return [key for key in keys if now >= self._get_retry_time(key, longest_s)]

    def record_update(
        self, ok: Iterable[ReplicaKey], failed: Iterable[ReplicaKey], now: float, cost_s: float
    ) -> None:
        """An update that took `cost_s` has ended at `now`."""
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
"""The replicas of an update by sender; a sender may have none."""
_Outcome = tuple[list[ReplicaKey], list[tuple[ReplicaKey, str]], dict[str, float]]
"""An `UpdateReport` in JSON, but for its version."""


def choose_sender_ranks(node_of_rank: Sequence[int], config: WeightsConfig) -> list[int]:
    """The trainer ranks that send, rank 0 first: the first of each node, then the second of each.

    As many as `weights.senders` says, else as trainer nodes; from disk replicas read by themselves.
    """
    if config.transport == "disk":
        return [0]
    seen: Counter[int] = Counter()
    places: list[tuple[int, int]] = []
    for rank, node in enumerate(node_of_rank):
        places.append((seen[node], rank))
        seen[node] += 1
    return [rank for _, rank in sorted(places)[: config.senders or len(seen)]]


class WeightSenders:
    """This rank's part in updates that several trainer ranks send.

    All ranks gather parameters together and so stay in step; each sender has update groups of its
    own, so a receiver that fails costs the others of no sender more than the wait for it.

    Args:
        sender_index: This rank's among the senders, 0 on rank 0; None of a rank that sends nothing.
        senders: How many there are.
        specs: What an update sends.
        transport: This rank's end of updates; None of a rank that sends nothing.
        gather: Gives rank 0 the messages of all ranks, decoded as a type. A collective.
    """

    def __init__(
        self,
        sender_index: int | None,
        senders: int,
        specs: Sequence[TensorSpec],
        transport: Transport[Any] | None,
        gather: Callable[[object, Any], list[Any]],
    ) -> None:
        self._place = sender_index
        self._senders = senders
        self._specs = specs
        self._transport = transport
        self._gather = gather
        self._sender_of: dict[tuple[str, int], int] = {}

    def assign(self, replicas: Sequence[ReplicaKey]) -> ReplicasBySender:
        """Divide the replicas of an update over senders.

        A replica keeps its sender, which holds the process group with it. A new one goes to the
        sender that has the fewest by now.
        """
        shares: ReplicasBySender = [[] for _ in range(self._senders)]
        for key in sorted(replicas, key=lambda key: key.cell_and_index):
            if key.cell_and_index not in self._sender_of:
                held = Counter(self._sender_of.values())
                fewest = min(range(self._senders), key=lambda sender: held[sender])
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
            On rank 0 the outcome at all replicas, elsewhere at this rank's own.
        """
        report, own = UpdateReport(version, (), {}), self._place
        if own is not None and self._transport is not None and replicas_by_sender[own]:
            report = self._transport.update(
                version, self._specs, parameters, replicas_by_sender[own], probe
            )
        for _ in parameters:  # every rank must exhaust them: exporting is a collective
            pass
        if not any(replicas_by_sender[1:]):
            return report
        outcome = report.ok, [*report.failed.items()], report.seconds
        outcomes: list[_Outcome] = self._gather(outcome, _Outcome)
        if not outcomes:
            return report
        reached, failed, seconds = zip(*outcomes, strict=True)
        names = dict.fromkeys(name for one in seconds for name in one)
        return UpdateReport(
            version,
            ok=tuple(key for one in reached for key in one),
            failed=dict(pair for one in failed for pair in one),
            seconds={name: max(one.get(name, 0.0) for one in seconds) for name in names},
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
