"""Trainer ranks that send weights at the same time, each to its share of the replicas."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct

from areal_hpc.errors import WeightSyncError
from areal_hpc.jobs.node.topology import get_task_position
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.trainer.collectives import broadcast_object, gather_objects_on_first_rank
from areal_hpc.weights.buckets import TensorSpec
from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.probe import Probe
from areal_hpc.weights.publisher import (
    ReplicasBySender,
    ReplicaSenderAssigner,
    choose_sender_ranks,
)
from areal_hpc.weights.update import Transport, UpdateReport
from areal_hpc.wire.weight_version import WeightVersion


class _SendOutcome(Struct, frozen=True):
    ok: tuple[ReplicaKey, ...]
    failed: list[tuple[ReplicaKey, str, str]]
    """With message and hint of each error."""
    parameter_bytes: int
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
        make_transport: Makes this rank's end when it has something to send for the first time.
    """

    def __init__(
        self,
        sender_index: int | None,
        senders: int,
        specs: Sequence[TensorSpec],
        make_transport: Callable[[], Transport[Any]],
    ) -> None:
        self._place = sender_index
        self._specs = specs
        self._make_transport = make_transport
        self._transport: Transport[Any] | None = None
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
        """Send each share from its rank; see `Transport.update`. A collective.

        Returns:
            On rank 0 the outcome at all replicas, elsewhere at this rank's own.
        """
        report, own = UpdateReport(version, (), {}, 0), self._place
        if own is not None and replicas_by_sender[own]:
            if self._transport is None:
                self._transport = self._make_transport()
            report = self._transport.update(
                version, self._specs, parameters, replicas_by_sender[own], probe
            )
        for _ in parameters:  # every rank must exhaust them: exporting is a collective
            pass
        if not any(replicas_by_sender[1:]):
            return report
        outcomes = gather_objects_on_first_rank(_describe_outcome(report), _SendOutcome)
        return _merge_outcomes(version, outcomes) if outcomes else report

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _describe_outcome(report: UpdateReport) -> _SendOutcome:
    problems = [(key, error.problems[0]) for key, error in report.failed.items()]
    return _SendOutcome(
        report.ok,
        [(key, problem.message, problem.hint) for key, problem in problems],
        report.parameter_bytes,
        report.seconds,
    )


def _merge_outcomes(version: WeightVersion, outcomes: Sequence[_SendOutcome]) -> UpdateReport:
    seconds: dict[str, float] = {}
    for outcome in outcomes:
        for name, spent_s in outcome.seconds.items():
            seconds[name] = max(seconds.get(name, 0.0), spent_s)
    return UpdateReport(
        version,
        ok=tuple(key for outcome in outcomes for key in outcome.ok),
        failed={
            key: WeightSyncError(message, hint=hint)
            for outcome in outcomes
            for key, message, hint in outcome.failed
        },
        parameter_bytes=max(outcome.parameter_bytes for outcome in outcomes),
        seconds=seconds,
    )
