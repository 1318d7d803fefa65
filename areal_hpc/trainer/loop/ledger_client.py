"""Trainer's client of the ledger, followed across restarts."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_hpc.errors import AgentError, HttpStatusError, SupersededTrainerError
from areal_hpc.rundir.rendezvous import LEDGER_SERVICE
from areal_hpc.rundir.service_client import ServiceClient
from areal_hpc.wire.ledger import (
    Acknowledged,
    BatchReply,
    BatchRequest,
    EvaluateReply,
    EvaluateRequest,
    FinishRunRequest,
    OpenTrainerGenerationRequest,
    WeightsPublishedRequest,
)
from areal_hpc.wire.retry import retry

ReplyT = TypeVar("ReplyT")

UNREACHABLE_TIMEOUT_S = 120.0
"""Time that the ledger may be away. Its supervisor starts it within seconds."""
REPLY_TIMEOUT_S = 15.0
"""A ledger that takes longer for what needs no waiting hangs."""
HTTP_CONFLICT = 409


class LedgerClient:
    """The ledger of a run, followed to its new address when it restarts.

    Every call raises SupersededTrainerError when a newer generation has been opened, and
    ClusterError when the ledger stays away or `is_stopping` becomes true while it is.
    """

    def __init__(
        self,
        rendezvous_dir: Path,
        service_key: str,
        generation: int,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._client = ServiceClient(rendezvous_dir, LEDGER_SERVICE, service_key)
        self._generation = generation
        self._is_stopping = is_stopping

    def open_generation(self, base_step: int, evaluated_step: int = -1) -> None:
        """This trainer has taken the generation, and goes on after `base_step`.

        If the evaluation of `evaluated_step` is under way, it may go on.
        """
        request = OpenTrainerGenerationRequest(self._generation, base_step, evaluated_step)
        self._call_ledger("/open_generation", request, Acknowledged)

    def request_batch(self, step: int, wait_s: float) -> BatchReply:
        """The batch that leads to `step`, or how far it is."""
        request = BatchRequest(self._generation, step, wait_s)
        reply = self._call_ledger("/batch", request, BatchReply, wait_s)
        _raise_if_agents_in_trouble(reply.trouble)
        return reply

    def report_weights_published(self, step: int) -> None:
        self._call_ledger("/publish", WeightsPublishedRequest(self._generation, step), Acknowledged)

    def request_evaluation(
        self, step: int, n_tasks_by_set: dict[str, int], wait_s: float
    ) -> EvaluateReply:
        """Ask for the evaluation of `step` on some sets, or how far it is."""
        request = EvaluateRequest(self._generation, step, n_tasks_by_set, wait_s)
        reply = self._call_ledger("/evaluate", request, EvaluateReply, wait_s)
        _raise_if_agents_in_trouble(reply.trouble)
        return reply

    def report_run_finished(self) -> None:
        self._call_ledger("/finish", FinishRunRequest(self._generation), Acknowledged)

    def close(self) -> None:
        self._client.close()

    def _call_ledger(
        self, route: str, request: msgspec.Struct, reply: type[ReplyT], wait_s: float = 0.0
    ) -> ReplyT:
        try:
            return retry(
                lambda: self._client.call(
                    route, request, reply, timeout_s=wait_s + REPLY_TIMEOUT_S
                ),
                UNREACHABLE_TIMEOUT_S,
                is_stopping=self._is_stopping,
            )
        except HttpStatusError as refusal:
            if refusal.status == HTTP_CONFLICT:
                raise SupersededTrainerError(refusal.body) from refusal
            raise


def _raise_if_agents_in_trouble(agent_error: str) -> None:
    if agent_error:
        has_hint = "\n  try: " in agent_error
        raise AgentError(
            agent_error, hint="" if has_hint else "fix it, and run the same command again"
        )
