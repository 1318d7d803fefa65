"""Replicas that lack the weights: which, and when they are tried again after a failure."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.rundir.rendezvous import EVALUATION_CELL
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.disk import DiskTransport
from areal_hpc.weights.replicas import DiscoveredReplicas, ReplicaDiscovery, ReplicaKey
from areal_hpc.weights.update import Transport
from areal_hpc.wire.replicas import UpdatePauseStats
from areal_hpc.wire.retry import Backoff
from areal_hpc.wire.weight_version import WeightVersion

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
        self._discovery = ReplicaDiscovery(
            rendezvous_dir, cells, service_key, evaluation_cell=evaluation_cell
        )
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
        replicas = self._discovery.discover()
        self.evaluation_replicas = [one for one in replicas if one[0].cell == EVALUATION_CELL]
        training = [one for one in replicas if one[0].cell != EVALUATION_CELL]
        self.replica_count = len(training)
        self.pauses = [view.pause for _, view in training if view.pause is not None]
        return find_outdated_replicas(training, version)

    def close(self) -> None:
        self.transport.close()
        self._discovery.close()


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
