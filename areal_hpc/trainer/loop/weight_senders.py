"""Trainer ranks that send weights at the same time, each to its share of the replicas."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from areal_hpc.jobs.node import get_task_position
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.trainer.collectives import broadcast_object, gather_objects_on_first_rank
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.replicas import ReplicaKey
from areal_hpc.weights.update import Probe, Transport, UpdateReport
from areal_hpc.wire.weight_version import WeightVersion

ReplicasBySender = list[list[ReplicaKey]]
"""The replicas of an update by sender; a sender may have none."""


_Outcome = tuple[list[ReplicaKey], list[tuple[ReplicaKey, str]], dict[str, float]]
"""An `UpdateReport` in JSON, but for its version."""


def agree_on_senders(config: WeightsConfig) -> list[int]:
    """The trainer ranks that send, on every rank. A collective."""
    nodes = gather_objects_on_first_rank(get_task_position().node_rank, int)
    ranks = choose_sender_ranks(nodes, config) if nodes else []
    agreed: list[int] = broadcast_object(ranks, list[int])
    return agreed


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
    """

    def __init__(
        self,
        sender_index: int | None,
        senders: int,
        specs: Sequence[TensorSpec],
        transport: Transport[Any] | None,
    ) -> None:
        self._place = sender_index
        self._senders = senders
        self._specs = specs
        self._transport = transport
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
        outcomes: list[_Outcome] = gather_objects_on_first_rank(outcome, _Outcome)
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
