"""New weights to many replicas: the face that the trainer's first rank sees."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from areal_hpc.cluster.topology import advertised_host
from areal_hpc.errors import WeightSyncError
from areal_hpc.telemetry import PhaseTimer
from areal_hpc.weights.attempt import Attempt, Step
from areal_hpc.weights.bucket import BucketBuffer, PackedBucket, largest_bytes, unpack
from areal_hpc.weights.census import Census
from areal_hpc.weights.checksum import Digests, rank_digests
from areal_hpc.weights.config import WeightsConfig
from areal_hpc.weights.control import ReplicaControl
from areal_hpc.weights.deadlines import step_s
from areal_hpc.weights.group import UpdateGroup
from areal_hpc.weights.plan import Bucket, TensorSpec, plan_buckets
from areal_hpc.weights.report import ReplicaKey, UpdateReport
from areal_hpc.weights.swap import GroupSwap
from areal_hpc.weights.version import WeightVersion

log = logging.getLogger(__name__)

_GROUPS_AT_ONCE = 1024
"""A thread for each group, made when needed: one that hangs must not keep others from a step."""


class Publisher:
    """Finds replicas that lack the current weights and sends them.

    Args:
        rendezvous_dir: Where the cells' relays are published.
        cells: How many cells the run has.
        admin_key: The run's secret for control routes.
        backend: `gloo` reaches replicas on CPUs, `nccl` replicas on GPUs.
        device: Where buckets are packed; must suit the backend.
    """

    def __init__(
        self,
        config: WeightsConfig,
        rendezvous_dir: Path,
        cells: int,
        admin_key: str,
        backend: str,
        device: torch.device,
    ) -> None:
        self._config = config
        self._census = Census(rendezvous_dir, cells, admin_key)
        self._admin_key = admin_key
        self._backend = backend
        self._device = device
        self._pool = ThreadPoolExecutor(_GROUPS_AT_ONCE, thread_name_prefix="publisher")
        self._swaps: dict[tuple[ReplicaKey, ...], GroupSwap] = {}
        self._suspects: set[tuple[str, int]] = set()
        self._serial = itertools.count()
        self._buffers: tuple[BucketBuffer, BucketBuffer] | None = None
        self._capacity_bytes = 0

    def outdated(self, version: WeightVersion) -> list[ReplicaKey]:
        """Replicas that are up and do not serve `version`. Unreachable cells are left out."""
        return [
            key
            for key, view in self._census.take()
            if view.state == "ready" or (view.state == "serving" and view.version != str(version))
        ]

    def publish(
        self,
        version: WeightVersion,
        specs: Sequence[TensorSpec],
        parameters: Iterable[tuple[str, torch.Tensor]],
        replicas: Sequence[ReplicaKey],
    ) -> UpdateReport:
        """Send `version` to `replicas`, verify it there and put them into service.

        Generation in progress is paused and goes on under the new weights. A replica that
        fails takes only its own group out of service; the rest proceeds.

        Args:
            version: What tokens sampled from now on carry.
            specs: All parameters in Hugging Face naming, in the order of `parameters`, in the
                dtype that the replicas serve. A tied output embedding is left out.
            parameters: Consumed exactly once and to its end, whatever fails: exporting is a
                collective on all trainer ranks.
            replicas: As `outdated` named them.

        Raises:
            WeightSyncError: The parameters are not what the specs promised. What goes wrong
                at replicas is in the report instead.
        """
        arrivals = iter(parameters)
        try:
            buckets = plan_buckets(specs, self._config.bucket_bytes)
            return self._update(version, buckets, arrivals, replicas)
        finally:
            for _ in arrivals:
                pass

    def _update(
        self,
        version: WeightVersion,
        buckets: list[Bucket],
        arrivals: Iterator[tuple[str, torch.Tensor]],
        replicas: Sequence[ReplicaKey],
    ) -> UpdateReport:
        timer = PhaseTimer()
        update = Attempt(self._pool, step_s(self._config.update_timeout_s))
        with timer.phase("join"):
            self._gather(update, version, replicas)
        try:
            with timer.phase("pause"):
                update.each(lambda swap: swap.pause())
            with timer.phase("transfer"):
                expected = self._transfer(update, version, buckets, arrivals)
                update.each(lambda swap: swap.end())
            with timer.phase("verify"):
                update.each(lambda swap: swap.verify(version, expected))
            with timer.phase("resume"):
                update.each(lambda swap: swap.resume(version))
        except BaseException:  # boundary: whatever stops the sender, no replica may wait for it
            update.give_up()
            raise
        self._swaps.update({swap.keys: swap for swap in update.live})
        self._suspects |= {key.place for key in update.failed}
        return UpdateReport(
            version,
            ok=tuple(key for swap in update.live for key in swap.keys),
            failed=update.failed,
            size_bytes=sum(bucket.size_bytes for bucket in buckets),
            seconds={name: round(spent, 6) for name, spent in timer.seconds.items()},
        )

    def _gather(
        self, update: Attempt, version: WeightVersion, replicas: Sequence[ReplicaKey]
    ) -> None:
        """Take the groups that still stand and form the others."""
        groups = partition(replicas, self._config.replicas_per_group, self._suspects)
        places = {key.place for key in replicas}
        self._suspects -= places  # from here on they are judged by this update
        for keys in [*self._swaps]:
            if keys not in groups and any(key.place in places for key in keys):
                self._swaps.pop(keys).abandon()  # a member was restarted or is grouped otherwise
        standing = [self._swaps.pop(keys) for keys in groups if keys in self._swaps]
        formed = {swap.keys for swap in standing}
        update.live = [self._new_swap(version, keys) for keys in groups if keys not in formed]
        update.each(lambda swap: swap.join())
        update.live += standing

    def _new_swap(self, version: WeightVersion, keys: tuple[ReplicaKey, ...]) -> GroupSwap:
        config = self._config
        members = "+".join(f"{key.cell}.{key.index}.{key.incarnation}" for key in keys)
        group = UpdateGroup(
            f"epoch{version.epoch}/{members}/{next(self._serial)}",
            advertised_host(),
            1 + sum(key.tp for key in keys),
            self._backend,
            config.update_timeout_s,
        )
        controls = [
            ReplicaControl(key, self._admin_key, version.epoch, config.update_timeout_s)
            for key in keys
        ]
        return GroupSwap(group, controls, config.pause_mode)

    def _transfer(
        self,
        update: Attempt,
        version: WeightVersion,
        buckets: list[Bucket],
        arrivals: Iterator[tuple[str, torch.Tensor]],
    ) -> dict[tuple[int, int], Digests] | None:
        """Pack each bucket while the one before it travels; the hashes to expect, if wanted."""
        expected: dict[tuple[int, int], Digests] = {
            (tp, rank): {} for tp in update.tp_sizes() for rank in range(tp)
        }
        buffers = self._buffers_for(buckets)
        sending: list[tuple[GroupSwap, Future[None]]] = []
        for number, bucket in enumerate(buckets):
            packed = buffers[number % 2].open(bucket)
            _fill(packed, arrivals)
            update.settle(sending)
            sending = update.start(_sender(packed, version if bucket is buckets[-1] else None))
            if self._config.verify_checksum:
                self._note_digests(expected, packed)
        update.settle(sending)
        if (extra := next(arrivals, None)) is not None:
            raise WeightSyncError(f"expected no parameter after the last spec, got {extra[0]}")
        return expected if self._config.verify_checksum else None

    def _note_digests(self, expected: dict[tuple[int, int], Digests], packed: PackedBucket) -> None:
        tensors = unpack(packed.bucket, packed.flat)
        replica_device = "cuda" if self._backend == "nccl" else "cpu"
        for (tp, rank), digests in expected.items():
            digests.update(rank_digests(tensors, rank, tp, replica_device))

    def _buffers_for(self, buckets: list[Bucket]) -> tuple[BucketBuffer, BucketBuffer]:
        """Two buffers in turn: one travels while the other is packed. Kept between updates."""
        needed_bytes = largest_bytes(buckets)
        if self._buffers is None or needed_bytes > self._capacity_bytes:
            self._capacity_bytes = needed_bytes
            self._buffers = (
                BucketBuffer(needed_bytes, self._device),
                BucketBuffer(needed_bytes, self._device),
            )
        return self._buffers

    def close(self) -> None:
        """Leave all groups. Replicas go on serving what they have."""
        for left in [self._pool.submit(swap.close) for swap in self._swaps.values()]:
            left.result()
        self._swaps.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._census.close()


def partition(
    replicas: Sequence[ReplicaKey], size: int, suspects: Set[tuple[str, int]]
) -> list[tuple[ReplicaKey, ...]]:
    """Groups of `size` neighbours. A suspect gets a group of its own: it may fail the next too.

    Args:
        replicas: Those to update.
        size: Replicas of a group; the last group may have fewer.
        suspects: Places whose last update failed.
    """
    ordered = sorted(replicas, key=lambda key: key.place)
    trusted = [key for key in ordered if key.place not in suspects]
    groups = [tuple(trusted[at : at + size]) for at in range(0, len(trusted), size)]
    return groups + [(key,) for key in ordered if key.place in suspects]


def _fill(packed: PackedBucket, arrivals: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Place arriving parameters until the bucket is full."""
    while not packed.is_full:
        arrival = next(arrivals, None)
        if arrival is None:
            raise WeightSyncError("the parameters ended before their specs did")
        packed.place(*arrival)


def _sender(packed: PackedBucket, complete: WeightVersion | None) -> Step:
    return lambda swap: swap.send(packed, complete)
