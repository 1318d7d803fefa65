"""Transport interface: one update from pause to resume."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.metrics.step_metrics import PhaseTimer
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.plan import BucketPlan
from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.probe import Probe, get_max_probe_gap
from areal_hpc.weights.replica_client import ReplicaClient, get_group_step_timeout_s
from areal_hpc.weights.update_session import SessionT, UpdateInProgress
from areal_hpc.wire.weight_version import WeightVersion

_MAX_CONCURRENT_GROUPS = 1024
"""A thread for each group, made when needed: one that hangs must not keep others from a step."""


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Order for one update."""

    version: WeightVersion
    buckets: Sequence[BucketPlan]
    arrivals: Iterator[tuple[str, torch.Tensor]]
    replicas: Sequence[ReplicaKey]
    probe: Probe
    """What the replicas must say under the new weights."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The outcome of one `Publisher.publish_from_this_rank`."""

    version: WeightVersion
    ok: tuple[ReplicaKey, ...]
    """Verified and open to agents."""
    failed: dict[ReplicaKey, WeightSyncError]
    """Left out of service; `discover_outdated_training_replicas` names them for a full resend."""
    parameter_bytes: int
    """Bytes of all parameters (sent once to each group)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the phases, see docs/weights.md; sampling stands still from `pause_call` on."""


class Transport(ABC, Generic[SessionT]):
    """Brings versions to replicas."""

    def __init__(self, config: WeightsConfig, service_key: str) -> None:
        self._config = config
        self._service_key = service_key
        self._pool = ThreadPoolExecutor(_MAX_CONCURRENT_GROUPS, thread_name_prefix="publisher")

    def update(self, update_request: UpdateRequest) -> UpdateReport:
        """Send, verify and put into service; see `Publisher.publish_from_this_rank`."""
        timer = PhaseTimer()
        update: UpdateInProgress[SessionT] = UpdateInProgress(
            self._pool, get_group_step_timeout_s(self._config.update_timeout_s)
        )
        specs = [slot.spec for bucket in update_request.buckets for slot in bucket.slots]
        max_gap = get_max_probe_gap(self._config, specs)
        try:
            self._pause_and_transfer(update, update_request, timer)
            with timer.time_phase("verify"):
                update.run_step_dropping_failed_groups(
                    "verify",
                    lambda session: session.verify(
                        update_request.version, update_request.probe, max_gap
                    ),
                )
            with timer.time_phase("flush"):
                update.run_step_dropping_failed_groups(
                    "flush", lambda session: session.flush_caches_unless_in_place()
                )
            with timer.time_phase("resume"):
                update.run_step_dropping_failed_groups(
                    "resume",
                    lambda session: session.resume_and_reopen_replicas(update_request.version),
                )
        except BaseException:  # boundary: whatever stops the sender, no replica may wait for it
            update.fail_all_sessions()
            raise
        self._finish_update(update)
        return UpdateReport(
            update_request.version,
            ok=tuple(key for session in update.live for key in session.keys),
            failed=update.failed,
            parameter_bytes=sum(bucket.size_bytes for bucket in update_request.buckets),
            seconds={name: round(spent, 6) for name, spent in timer.seconds.items()},
        )

    @abstractmethod
    def _pause_and_transfer(
        self,
        update: UpdateInProgress[SessionT],
        update_request: UpdateRequest,
        timer: PhaseTimer,
    ) -> None:
        """Pause the replicas and load the weights there."""

    @abstractmethod
    def _finish_update(self, update: UpdateInProgress[SessionT]) -> None:
        """Keep what later updates can use, and nothing else."""

    def _build_replica_client(self, key: ReplicaKey, version: WeightVersion) -> ReplicaClient:
        return ReplicaClient(
            key,
            self._service_key,
            version.generation,
            self._config.update_timeout_s,
            self._config.senders or 1,
        )

    def close(self) -> None:
        """Replicas go on serving what they have."""
        self._pool.shutdown(wait=False, cancel_futures=True)
