"""Transport interface: one update from pause to resume."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic

import torch

from areal_hpc.metrics.step_metrics import PhaseTimer
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.bucket import OpenBucket
from areal_hpc.weights.buckets.plan import BucketPlan
from areal_hpc.weights.checksum import Digests, compute_rank_digests
from areal_hpc.weights.deadlines import get_step_deadline_s
from areal_hpc.weights.replica_client import ReplicaClient
from areal_hpc.weights.report import ReplicaKey, UpdateReport
from areal_hpc.weights.update import GroupUpdate, SessionT
from areal_hpc.wire.weight_version import WeightVersion

_GROUPS_AT_ONCE = 1024
"""A thread for each group, made when needed: one that hangs must not keep others from a step."""

TensorStream = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """What one update is to do."""

    version: WeightVersion
    buckets: Sequence[BucketPlan]
    arrivals: TensorStream
    replicas: Sequence[ReplicaKey]

    @property
    def tp_sizes(self) -> set[int]:
        """Tensor-parallel sizes of the replicas."""
        return {key.tp for key in self.replicas}


class ExpectedChecksums:
    """The hashes that replicas must report, by (tensor-parallel size, rank).

    Args:
        tp_sizes: Of the replicas.
        replica_device: `cpu` or `cuda`: decides the kind of hash.
    """

    def __init__(self, tp_sizes: set[int], replica_device: str) -> None:
        self.digests: dict[tuple[int, int], Digests] = {
            (tp, rank): {} for tp in tp_sizes for rank in range(tp)
        }
        self._replica_device = replica_device

    def note(self, full: OpenBucket) -> None:
        """Add those of one bucket."""
        tensors = full.tensors
        for (tp, rank), digests in self.digests.items():
            digests.update(compute_rank_digests(tensors, rank, tp, self._replica_device))


class Transport(ABC, Generic[SessionT]):
    """Brings versions to replicas.

    Args:
        config: The recipe's section.
        admin_key: The run's secret for control routes.
        device: Where the trainer's weights are.
    """

    def __init__(self, config: WeightsConfig, admin_key: str, device: torch.device) -> None:
        self._config = config
        self._admin_key = admin_key
        self._replica_device = device.type
        self._pool = ThreadPoolExecutor(_GROUPS_AT_ONCE, thread_name_prefix="publisher")

    def update(self, order: UpdateOrder) -> UpdateReport:
        """Send, verify and put into service; see `Publisher.publish`."""
        timer = PhaseTimer()
        update: GroupUpdate[SessionT] = GroupUpdate(
            self._pool, get_step_deadline_s(self._config.update_timeout_s)
        )
        try:
            expected = self._carry(update, order, timer)
            digests = expected.digests if self._config.verify_checksum else None
            with timer.phase("verify"):
                update.each("verify", lambda swap: swap.verify(order.version, digests))
            with timer.phase("flush"):
                update.each("flush", lambda swap: swap.flush())
            with timer.phase("resume"):
                update.each("resume", lambda swap: swap.resume(order.version))
        except BaseException:  # boundary: whatever stops the sender, no replica may wait for it
            update.give_up()
            raise
        self._keep(update)
        return UpdateReport(
            order.version,
            ok=tuple(key for swap in update.live for key in swap.keys),
            failed=update.failed,
            size_bytes=sum(bucket.size_bytes for bucket in order.buckets),
            seconds={name: round(spent, 6) for name, spent in timer.seconds.items()},
        )

    @abstractmethod
    def _carry(
        self, update: GroupUpdate[SessionT], order: UpdateOrder, timer: PhaseTimer
    ) -> ExpectedChecksums:
        """Pause the replicas and load the weights there."""

    @abstractmethod
    def _keep(self, update: GroupUpdate[SessionT]) -> None:
        """Keep what later updates can use, and nothing else."""

    def _pause(self, update: GroupUpdate[SessionT], timer: PhaseTimer) -> None:
        with timer.phase("pause_call"):
            update.each("pause", lambda swap: swap.pause())

    def _control(self, key: ReplicaKey, version: WeightVersion) -> ReplicaClient:
        return ReplicaClient(
            key, self._admin_key, version.generation, self._config.update_timeout_s
        )

    def _watch(self, expected: ExpectedChecksums, full: OpenBucket) -> None:
        if self._config.verify_checksum:
            expected.note(full)

    def close(self) -> None:
        """Replicas go on serving what they have."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def get_max_load_s(update: GroupUpdate[SessionT]) -> float:
    """What the slowest of the replicas that take part took to load."""
    return max((swap.load_s for swap in update.live), default=0.0)
