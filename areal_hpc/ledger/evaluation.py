"""Evaluation of a step: tickets of its sets, their rewards, and the results of complete sets."""

import logging
import statistics
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from areal_hpc.evaluation.set_metrics import SetSamples, build_metric_row, estimate_metrics
from areal_hpc.evaluation.set_names import (
    VALIDATION_SET_NAME,
    get_ticket_id_in_evaluation,
    split_ticket_id,
)
from areal_hpc.ledger.leases import Lease, LeaseTable
from areal_hpc.metrics.step_metrics import VALIDATION_REWARD_METRIC
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.rundir import manifests
from areal_hpc.rundir.manifests import EvaluatedTicket, EvaluationResult, LedgerState
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.ledger import EvaluationResultRequest, TicketRef

log = logging.getLogger(__name__)

ATTEMPT_NUMBERS_PER_GENERATION = 1_000_000
"""Attempts of generation k begin above k times this, so a result names its generation."""


@dataclass(frozen=True, slots=True)
class EvaluationSetPart:
    """First tasks of an evaluation set, which are evaluated."""

    number: int
    n_tasks: int
    n_samples: int = 1

    @property
    def ticket_ids(self) -> range:
        """Ids of the tickets, one for each task."""
        return range(
            get_ticket_id_in_evaluation(self.number, 0),
            get_ticket_id_in_evaluation(self.number, self.n_tasks),
        )


class EvaluationState:
    """State of an evaluation on the weights of one step, with a ticket for each held-out task.

    A ticket is pending, leased or done. The first result of any attempt of the generation counts.
    The class does no I/O and reads no clock.
    """

    def __init__(
        self,
        step: int,
        sets: Mapping[str, EvaluationSetPart],
        *,
        generation: int = 0,
        first_attempt: int = 1,
    ) -> None:
        self.step = step
        self.generation = generation
        """Generation of the weights; a later one may have other weights at the same step."""
        self.sets = dict(sets)
        self.rewards: dict[int, list[float]] = {}
        """Rewards of the samples of done tickets, by ticket id."""
        self.failures: dict[int, str] = {}
        """Reasons of tickets that could not be run and have rewards of 0, by ticket id."""
        self.written = set[str]()
        """Names of the sets whose results are durable."""
        self._answers: dict[int, list[str]] = {}
        self._part_by_ticket = {
            ticket_id: part for part in self.sets.values() for ticket_id in part.ticket_ids
        }
        # After very many starts of the ledger the numbers wrap within the generation.
        first = (first_attempt - 1) % ATTEMPT_NUMBERS_PER_GENERATION + 1
        self._pending = OrderedDict.fromkeys(
            self._part_by_ticket, generation * ATTEMPT_NUMBERS_PER_GENERATION + first
        )
        self._leased = LeaseTable()

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    @property
    def n_tasks_left(self) -> int:
        return len(self._part_by_ticket) - len(self.rewards)

    @property
    def n_episodes(self) -> int:
        return sum(part.n_samples for part in self._part_by_ticket.values())

    @property
    def n_episodes_done(self) -> int:
        return sum(len(rewards) for rewards in self.rewards.values())

    def lease_tickets(self, cell: str, capacity: int, now_s: float) -> list[TicketRef]:
        """Lease pending tickets to `cell`, whose last one may exceed `capacity` in episodes."""
        refs: list[TicketRef] = []
        while self._pending and capacity > 0:
            ticket_id, attempt = self._pending.popitem(last=False)
            self._leased.add(ticket_id, Lease(cell, attempt, attempt, now_s))
            refs.append(TicketRef(ticket_id, attempt, self.step))
            capacity -= self._part_by_ticket[ticket_id].n_samples
        return refs

    def count_episodes_of_tickets(self, refs: Sequence[TicketRef]) -> int:
        return sum(self._part_by_ticket[ref.ticket_id].n_samples for ref in refs)

    def reconcile_cell_report(self, cell: str, running: Sequence[TicketRef], now_s: float) -> None:
        """Renew the leases that a cell reports as running; its other leases become pending."""
        own_refs = [ref for ref in running if ref.eval_step == self.step]
        for ref in own_refs:
            self._leased.touch(ref.ticket_id, cell, ref.attempt, now_s)
        self._make_leases_pending_again(
            self._leased.pop_unreported(cell, {ref.ticket_id for ref in own_refs})
        )

    def record_rewards(
        self, ref: TicketRef, rewards: Sequence[float], answers: Sequence[str] = ()
    ) -> bool:
        """Record a result; return False if the task has one, or another evaluation issued it."""
        if (ref.eval_step, ref.attempt // ATTEMPT_NUMBERS_PER_GENERATION) != (
            self.step,
            self.generation,
        ):
            return False
        part = self._part_by_ticket.get(ref.ticket_id)
        if part is None or len(rewards) != part.n_samples or ref.ticket_id in self.rewards:
            return False
        self._leased.pop(ref.ticket_id)
        self._pending.pop(ref.ticket_id, None)  # the result of a silent cell may arrive late
        self.rewards[ref.ticket_id] = list(rewards)
        self._answers[ref.ticket_id] = list(answers)
        return True

    def restore_rewards(self, ticket: EvaluatedTicket) -> None:
        """Restore a result of the same weights after a restart of the ledger."""
        attempt = self.generation * ATTEMPT_NUMBERS_PER_GENERATION
        ref = TicketRef(ticket.ticket_id, attempt, self.step)
        self.record_rewards(ref, ticket.rewards, ticket.answers)

    def score_failed_task_zero(self, ref: TicketRef, reason: str) -> None:
        part = self._part_by_ticket.get(ref.ticket_id)
        if part is not None and self.record_rewards(ref, [0.0] * part.n_samples):
            self.failures[ref.ticket_id] = reason

    def expire_leases(self, before_s: float) -> int:
        silent = self._leased.pop_silent(before_s)
        self._make_leases_pending_again(silent)
        return len(silent)

    def build_unwritten_results(self) -> Iterator[tuple[str, EvaluationResult]]:
        """Yield the results of the sets that are done and not `written`."""
        for name, part in self.sets.items():
            if name not in self.written and all(
                ticket_id in self.rewards for ticket_id in part.ticket_ids
            ):
                yield name, self._build_result(part)

    def _build_result(self, set_part: EvaluationSetPart) -> EvaluationResult:
        ids = set_part.ticket_ids
        samples = [self.rewards[ticket_id] for ticket_id in ids]
        answers = [self._answers[ticket_id] or [""] * set_part.n_samples for ticket_id in ids]
        has_answers = any(map(any, answers))
        # `fmean` rounds once, so the same rewards in another order have the same mean.
        means = [statistics.fmean(rewards) for rewards in samples]
        return EvaluationResult(
            self.step,
            set_part.n_tasks,
            sum(means) / len(means),
            means,
            {n - ids[0]: self.failures[n] for n in ids if n in self.failures},
            self.generation,
            samples if set_part.n_samples > 1 else [],
            answers if has_answers else [],
        )

    def _make_leases_pending_again(self, leases: Sequence[tuple[int, Lease]]) -> None:
        for ticket_id, lease in leases:
            self._pending[ticket_id] = lease.newest_attempt + 1


class SetEvaluator:
    """Evaluator of sets on the weights of one step after another.

    A set is durable when it is done, so only the others are played again after a crash.
    """

    def __init__(self, paths: RunPaths, sets: Mapping[str, EvaluationSet]) -> None:
        self._paths = paths
        self._sets = dict(sets)
        self.give_up()

    def give_up(self) -> None:
        """Stop the evaluation that was requested."""
        self.tickets = EvaluationState(-1, {})
        self._requested: tuple[int, dict[str, int]] = (-1, {})

    def begin(
        self, step: int, n_tasks_by_set: dict[str, int], state: LedgerState, first_attempt: int
    ) -> bool:
        """Begin another evaluation, and return False if this one is under way already.

        After an error of the storage nothing has changed, and the request may be repeated.
        """
        if self._requested == (step, n_tasks_by_set):
            return False
        results = self._read_results(step, n_tasks_by_set, state)
        parts = {
            name: EvaluationSetPart(self._sets[name].number, n_tasks, self._sets[name].n_samples)
            for name, n_tasks in n_tasks_by_set.items()
            if name not in results
        }
        tickets = EvaluationState(
            step, parts, generation=state.generation, first_attempt=first_attempt
        )
        for ticket in manifests.read_evaluated_tickets(self._paths, step):
            if state.has_kept_weights(step, ticket.generation):
                tickets.restore_rewards(ticket)
        self.tickets, self._requested = tickets, (step, n_tasks_by_set)
        return True

    def record_result(self, request: EvaluationResultRequest) -> None:
        """Record the rewards of a task, also on disk for a restarted ledger.

        Failed tasks are not written, so a restarted ledger plays them again. An error of the
        storage costs only a repetition of the task.
        """
        if not self.tickets.record_rewards(request.ref, request.rewards, request.answers):
            return
        ticket = EvaluatedTicket(
            request.ref.ticket_id, self.tickets.generation, request.rewards, request.answers
        )
        try:
            manifests.append_evaluated_ticket(self._paths, self.tickets.step, ticket)
        except OSError as error:
            log.warning("the rewards of %s are in memory only: %s", request.ref, error)

    def advance(self, state: LedgerState) -> tuple[int, dict[str, float] | None]:
        """Return the number of tasks done, and the metrics when the evaluation is complete."""
        for name, result in self.tickets.build_unwritten_results():
            manifests.write_evaluation(self._paths, name, result)
            self.tickets.written.add(name)
        step, n_tasks_by_set = self._requested
        total = sum(n_tasks_by_set.values())
        if self.tickets.n_tasks_left:
            return total - self.tickets.n_tasks_left, None
        done = {self._sets[name].number for name in n_tasks_by_set}
        tickets = manifests.read_evaluated_tickets(self._paths, step)
        left = [ticket for ticket in tickets if split_ticket_id(ticket.ticket_id)[0] not in done]
        manifests.replace_evaluated_tickets(self._paths, step, left)
        results = self._read_results(step, n_tasks_by_set, state)
        self.give_up()
        return total, compute_result_metrics(results, self._sets)

    def _read_results(
        self, step: int, n_tasks_by_set: Mapping[str, int], state: LedgerState
    ) -> dict[str, EvaluationResult]:
        """Read the results of a step, by set, that belong to the run's present weights."""
        results = {}
        for name, n_tasks in n_tasks_by_set.items():
            result = manifests.read_evaluation(self._paths, step, name)
            if result is None or result.n_tasks != n_tasks:
                continue
            if state.has_kept_weights(step, result.generation):
                results[name] = result
        return results


def compute_result_metrics(
    results: Mapping[str, EvaluationResult], sets: Mapping[str, EvaluationSet]
) -> dict[str, float]:
    """Compute the metrics of an evaluated step from the results of its sets."""
    row: dict[str, float] = {}
    for name, result in results.items():
        if name == VALIDATION_SET_NAME:
            row[VALIDATION_REWARD_METRIC] = result.mean_reward
        samples = SetSamples(result.list_sample_rewards(), result.answers)
        estimates = estimate_metrics(samples, sets[name].metrics, sets[name].pass_reward)
        row |= build_metric_row(name, estimates)
    return row
