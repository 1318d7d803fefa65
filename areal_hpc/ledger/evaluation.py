"""One evaluation: its tickets and their rewards. Pure: time is passed in."""

from collections import OrderedDict
from collections.abc import Sequence

from areal_hpc.ledger.leases import Lease, LeaseTable
from areal_hpc.rundir.manifests import EvaluationResult
from areal_hpc.wire.ledger import TicketRef

ATTEMPTS_PER_GENERATION = 1_000_000
"""Attempts of generation k begin above k times this: a result tells whose weights it is of."""


class EvaluationState:
    """Held-out tasks 0..n_tasks-1, one episode each, on the weights of one step.

    A ticket is pending, leased or done. Results are taken from any attempt of the generation, once.
    """

    def __init__(
        self, step: int, n_tasks: int, *, generation: int = 0, first_attempt: int = 1
    ) -> None:
        self.step = step
        self.generation = generation
        """The generation of the weights: a later one may have others at the same step."""
        self.n_tasks = n_tasks
        self.rewards: dict[int, float] = {}
        """Task index -> reward, of the tickets that are done."""
        self.failures: dict[int, str] = {}
        """Task index -> reason, of the episodes that could not be run. Their reward is 0."""
        self._pending = OrderedDict.fromkeys(
            range(n_tasks), generation * ATTEMPTS_PER_GENERATION + first_attempt
        )
        self._leased = LeaseTable()

    @property
    def n_pending(self) -> int:
        """Tickets that can be granted now."""
        return len(self._pending)

    @property
    def mean_reward(self) -> float | None:
        """Mean over all tasks; None until every task has a reward."""
        is_done = len(self.rewards) == self.n_tasks
        return sum(self.rewards.values()) / self.n_tasks if is_done else None

    def lease_tickets(self, cell: str, count: int, now_s: float) -> list[TicketRef]:
        """Hand up to `count` pending tickets to `cell`."""
        refs: list[TicketRef] = []
        while self._pending and len(refs) < count:
            index, attempt = self._pending.popitem(last=False)
            self._leased.add(index, Lease(cell, attempt, attempt, now_s))
            refs.append(TicketRef(index, attempt, self.step))
        return refs

    def reconcile_cell_report(self, cell: str, held: Sequence[TicketRef], now_s: float) -> None:
        """Take a cell's word on what it runs; the rest of its leases here wait."""
        ours = [ref for ref in held if ref.eval_step == self.step]
        for ref in ours:
            self._leased.touch(ref.ticket_id, cell, ref.attempt, now_s)
        self._make_leases_pending_again(
            self._leased.pop_unreported(cell, {ref.ticket_id for ref in ours})
        )

    def record_reward(self, ref: TicketRef, reward: float) -> bool:
        """Take a result; False if the task had one already or is none of ours."""
        if (ref.eval_step, ref.attempt // ATTEMPTS_PER_GENERATION) != (self.step, self.generation):
            return False
        if not 0 <= ref.ticket_id < self.n_tasks or ref.ticket_id in self.rewards:
            return False
        self._leased.pop(ref.ticket_id)
        self._pending.pop(ref.ticket_id, None)  # a lost cell's result arrived after all
        self.rewards[ref.ticket_id] = reward
        return True

    def score_failed_task_zero(self, ref: TicketRef, reason: str) -> None:
        """The agent kept failing on this task: it scores 0."""
        if self.record_reward(ref, 0.0):
            self.failures[ref.ticket_id] = reason

    def expire_leases(self, before_s: float) -> int:
        """Make tickets not reported since `before_s` pending again; return how many."""
        silent = self._leased.pop_silent(before_s)
        self._make_leases_pending_again(silent)
        return len(silent)

    def _make_leases_pending_again(self, leases: Sequence[tuple[int, Lease]]) -> None:
        for index, lease in leases:
            self._pending[index] = lease.newest_attempt + 1


def build_evaluation_result(done: EvaluationState, mean_reward: float) -> EvaluationResult:
    """Record of a finished evaluation for the run directory."""
    rewards = [done.rewards[index] for index in range(done.n_tasks)]
    return EvaluationResult(
        done.step, done.n_tasks, mean_reward, rewards, done.failures, done.generation
    )
