"""Broadcast transport: weight buckets through process groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set

import torch

from areal_hpc.jobs.topology import get_advertised_host
from areal_hpc.metrics.step_metrics import PhaseTimer
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.bucket import InPlaceBucket, OpenBucket, PackingBuffers
from areal_hpc.weights.buckets.pipeline import WaitSent, send_all
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.weights.transports.group_session import BroadcastSession
from areal_hpc.weights.transports.process_group import UpdateProcessGroup
from areal_hpc.weights.transports.transport import (
    ExpectedChecksums,
    Transport,
    UpdateOrder,
    get_max_load_s,
)
from areal_hpc.weights.update import GroupUpdate, SessionStep
from areal_hpc.wire.weight_version import WeightVersion

_SERIAL = itertools.count()
"""Part of group names: torch takes none twice in the life of a process."""


class BroadcastTransport(Transport[BroadcastSession]):
    """Keeps the groups of replicas that are well from one update to the next.

    Args:
        config: The recipe's section.
        admin_key: The run's secret for control routes.
        device: Where the trainer's weights are; must suit the backend.
        backend: `gloo` reaches replicas on CPUs, `nccl` replicas on GPUs.
    """

    def __init__(
        self, config: WeightsConfig, admin_key: str, device: torch.device, backend: str
    ) -> None:
        super().__init__(config, admin_key, device)
        self._backend = backend
        self._replica_device = "cuda" if backend == "nccl" else "cpu"
        self._open_bucket = (
            InPlaceBucket
            if sends_in_place(backend, config.replicas_per_group)
            else PackingBuffers(device).open
        )
        self._swaps: dict[tuple[ReplicaKey, ...], BroadcastSession] = {}
        self._suspects: set[tuple[str, int]] = set()

    def _carry(
        self, update: GroupUpdate[BroadcastSession], order: UpdateOrder, timer: PhaseTimer
    ) -> ExpectedChecksums:
        expected = ExpectedChecksums(order.tp_sizes, self._replica_device)
        last = order.buckets[-1] if order.buckets else None

        def ship(full: OpenBucket) -> WaitSent:
            complete = order.version if full.bucket is last else None
            sending = update.start("send", _sender(full, complete))
            return lambda: update.settle(sending)

        with timer.phase("group_join"):
            self._gather(update, order)
        self._pause(update, timer)
        with timer.phase("transfer"):
            send_all(
                order.buckets,
                order.arrivals,
                self._open_bucket,
                ship,
                lambda full: self._watch(expected, full),
            )
            update.each("end", lambda swap: swap.end())
        load_s = get_max_load_s(update)
        timer.seconds |= {"transfer": timer.seconds["transfer"] - load_s, "load": load_s}
        return expected

    def _gather(self, update: GroupUpdate[BroadcastSession], order: UpdateOrder) -> None:
        """Take the groups that still stand and form the others."""
        groups = partition_replicas(order.replicas, self._config.replicas_per_group, self._suspects)
        places = {key.place for key in order.replicas}
        self._suspects -= places  # from here on they are judged by this update
        for keys in [*self._swaps]:
            if keys not in groups and any(key.place in places for key in keys):
                self._swaps.pop(keys).abandon()  # a member was restarted or is grouped otherwise
        standing = [self._swaps.pop(keys) for keys in groups if keys in self._swaps]
        formed = {swap.keys for swap in standing}
        update.live = [self._new_swap(order.version, keys) for keys in groups if keys not in formed]
        update.each("join", lambda swap: swap.join())
        update.live += standing

    def _new_swap(self, version: WeightVersion, keys: tuple[ReplicaKey, ...]) -> BroadcastSession:
        members = "+".join(f"{key.cell}.{key.index}.{key.incarnation}" for key in keys)
        group = UpdateProcessGroup(
            f"generation{version.generation}/{members}/{next(_SERIAL)}",
            get_advertised_host(),
            1 + sum(key.tp for key in keys),
            self._backend,
            self._config.update_timeout_s,
        )
        return BroadcastSession(group, [self._control(key, version) for key in keys], self._config)

    def _keep(self, update: GroupUpdate[BroadcastSession]) -> None:
        self._swaps.update({swap.keys: swap for swap in update.live})
        self._suspects |= {key.place for key in update.failed}

    def close(self) -> None:
        """Leave all groups."""
        for left in [self._pool.submit(swap.close) for swap in self._swaps.values()]:
            left.result()
        self._swaps.clear()
        super().close()


def sends_in_place(backend: str, replicas_per_group: int) -> bool:
    """Whether every parameter is a message of its own, or a bucket is packed into one.

    For gloo a copy is a third of the work of sending; NCCL copies for nothing and pays per message.
    But when a member of a group dies, gloo may leave another waiting for a message that was under
    way for as long as torch's default deadline, and SGLang has all of a bucket's messages under
    way at once. Alone with a sender that dies, it is restarted anyway.
    """
    return backend == "gloo" and replicas_per_group == 1


def partition_replicas(
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


def _sender(full: OpenBucket, complete: WeightVersion | None) -> SessionStep[BroadcastSession]:
    return lambda swap: swap.send(full, complete)
