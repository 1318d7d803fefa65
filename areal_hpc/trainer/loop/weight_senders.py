"""Trainer ranks that send weights at the same time, each to its share of the replicas."""

from collections.abc import Callable, Iterable, Sequence

import torch
from msgspec import Struct

from areal_hpc.errors import WeightSyncError
from areal_hpc.jobs.node.topology import get_task_position
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.trainer.collectives import broadcast_object, gather_objects_on_first_rank
from areal_hpc.weights.buckets.plan import TensorSpec
from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.probe import Probe
from areal_hpc.weights.replicas_by_sender import (
    ReplicasBySender,
    ReplicaSenderAssigner,
    choose_sender_ranks,
)
from areal_hpc.weights.sender import WeightSender
from areal_hpc.weights.transports.transport import UpdateReport
from areal_hpc.wire.weight_version import WeightVersion


class _SendOutcome(Struct, frozen=True):
    sender: int
    ok: list[int]
    failed: dict[int, tuple[str, str]]
    """Message and hint of each error."""
    size_bytes: int
    seconds: dict[str, float]


def agree_on_senders(config: WeightsConfig) -> list[int]:
    """The trainer ranks that send, on every rank. A collective."""
    nodes = gather_objects_on_first_rank(get_task_position().node_rank, int)
    ranks = choose_sender_ranks(nodes, config) if nodes else []
    agreed: list[int] = broadcast_object(ranks, list[int])
    return agreed


class WeightSenders:
    """This rank's part in updates that several trainer ranks send.

    All ranks gather parameters together and so stay in step; each sender has update groups of its
    own, so a receiver that fails costs the others of no sender more than the wait for it.

    Args:
        sender_index: This rank's among the senders, 0 on rank 0; None of a rank that sends nothing.
        senders: How many there are.
        specs: What an update sends.
        make_sender: This rank's end, made when it has something to send for the first time.
    """

    def __init__(
        self,
        sender_index: int | None,
        senders: int,
        specs: Sequence[TensorSpec],
        make_sender: Callable[[], WeightSender],
    ) -> None:
        self._place = sender_index
        self._specs = specs
        self._make_sender = make_sender
        self._sender: WeightSender | None = None
        self._assigner = ReplicaSenderAssigner(senders)

    def assign(self, replicas: Sequence[ReplicaKey]) -> ReplicasBySender:
        return self._assigner.assign(replicas)

    def send(
        self,
        version: WeightVersion,
        replicas_by_sender: ReplicasBySender,
        parameters: Iterable[tuple[str, torch.Tensor]],
        probe: Probe,
    ) -> UpdateReport:
        """Send each share from its rank; see `WeightSender.update_replicas`. A collective.

        Returns:
            On rank 0 the outcome at all replicas, elsewhere at this rank's own.
        """
        report, own = UpdateReport(version, (), {}, 0), self._place
        if own is not None and replicas_by_sender[own]:
            if self._sender is None:
                self._sender = self._make_sender()
            report = self._sender.update_replicas(
                version, self._specs, parameters, replicas_by_sender[own], probe
            )
        for _ in parameters:  # exporting is a collective: who sends nothing drains it
            pass
        if not any(replicas_by_sender[1:]):
            return report
        outcome = None if own is None else _describe_outcome(own, report, replicas_by_sender[own])
        found = gather_objects_on_first_rank(outcome, _SendOutcome | None)
        return (
            _merge_outcomes(version, replicas_by_sender, [one for one in found if one])
            if found
            else report
        )

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


def _describe_outcome(
    sender: int, report: UpdateReport, replica_share: Sequence[ReplicaKey]
) -> _SendOutcome:
    place_of = {key: place for place, key in enumerate(replica_share)}
    problems = {place_of[key]: error.problems[0] for key, error in report.failed.items()}
    return _SendOutcome(
        sender,
        [place_of[key] for key in report.ok],
        {place: (problem.message, problem.hint) for place, problem in problems.items()},
        report.parameter_bytes,
        report.seconds,
    )


def _merge_outcomes(
    version: WeightVersion, replicas_by_sender: ReplicasBySender, outcomes: Sequence[_SendOutcome]
) -> UpdateReport:
    seconds: dict[str, float] = {}
    for one in outcomes:
        for name, spent in one.seconds.items():
            seconds[name] = max(seconds.get(name, 0.0), spent)
    return UpdateReport(
        version,
        ok=tuple(replicas_by_sender[one.sender][place] for one in outcomes for place in one.ok),
        failed={
            replicas_by_sender[one.sender][place]: WeightSyncError(message, hint=hint)
            for one in outcomes
            for place, (message, hint) in one.failed.items()
        },
        parameter_bytes=max(one.size_bytes for one in outcomes),
        seconds=seconds,
    )
