"""Counts of dropped tickets, which show that no batch can form or that the agent always fails."""

from collections import Counter
from dataclasses import dataclass, field

from areal_hpc.rundir.manifests import DropKind, DroppedTicket
from areal_hpc.wire.ledger import DropTicketRequest, IrregularTicketCounts, TaskSplit, TicketRef

MAX_FAILED_STREAK_BATCHES = 2
"""Number of batches' tickets failed in a row after which the run ends."""
MAX_REJECTED_STREAK_BATCHES = 20
"""Number of batches' tickets filtered or stale in a row after which the run ends."""
MIN_REJECTED_STREAK_TICKETS = 100
"""Least number of such tickets, because small batches have longer streaks by chance."""

ALIKE_FIRST_FAILURES_TO_STOP = 3
"""Number of first tickets failed by the same cause that ends the run."""

_DROP_PHRASE_BY_KIND: dict[DropKind, str] = {
    "failed": "tickets in a row failed",
    "filtered": "groups in a row were filtered out: the tasks are too hard or "
    "too easy for the model, or rollout.should_accept rejects everything",
    "stale": "tickets were dropped as stale (rollout.stale_groups) without forming a batch",
}


class DropStats:
    """Dropped tickets and reasons; their numbers in all, since the last batch, and in a row."""

    def __init__(self, batch_size: int) -> None:
        max_streak = max(MIN_REJECTED_STREAK_TICKETS, MAX_REJECTED_STREAK_BATCHES * batch_size)
        self._max_streaks: dict[DropKind, int] = dict.fromkeys(_DROP_PHRASE_BY_KIND, max_streak)
        self._max_streaks["failed"] = MAX_FAILED_STREAK_BATCHES * batch_size
        self._kind_of: dict[int, DropKind] = {}
        self._total: Counter[DropKind] = Counter()
        self._reported: Counter[DropKind] = Counter()  # in manifests
        self._streaks: Counter[DropKind] = Counter()
        self._reasons: dict[DropKind, str] = {}

    def count_drops(self, *kinds: DropKind) -> int:
        return sum(self._total[kind] for kind in kinds)

    def get_drop_kind(self, ticket_id: int) -> DropKind | None:
        return self._kind_of.get(ticket_id)

    def record_drop(self, dropped_ticket: DroppedTicket) -> None:
        self._kind_of[dropped_ticket.ref.ticket_id] = dropped_ticket.kind
        self._total[dropped_ticket.kind] += 1
        self._streaks[dropped_ticket.kind] += 1
        self._reasons[dropped_ticket.kind] = dropped_ticket.reason
        if dropped_ticket.kind == "filtered":  # its episodes were complete
            self._streaks["failed"] = 0

    def record_settled_ticket(self) -> None:
        self._streaks["failed"] = self._streaks["filtered"] = 0

    def mark_reported_in_manifest(self, counts: IrregularTicketCounts) -> None:
        """Record that a batch was formed whose manifest has these counts."""
        self._streaks["stale"] = 0
        self._reported.update(
            stale=counts.stale_dropped,
            filtered=counts.filtered,
            failed=counts.failed,
        )

    def reset_streaks(self) -> None:
        self._streaks.clear()

    def build_batch_counts(self, stale_trained: int) -> IrregularTicketCounts:
        """Build the counts of the next batch's manifest since the last one."""
        unreported = self._total - self._reported
        return IrregularTicketCounts(
            stale_trained=stale_trained,
            stale_dropped=unreported["stale"],
            filtered=unreported["filtered"],
            failed=unreported["failed"],
        )

    def find_problem(self) -> str:
        """Return the reason why no batch can form if a streak is too long; else an empty string."""
        for kind, count in self._streaks.items():
            if count >= self._max_streaks[kind]:
                return (
                    f"{count} {_DROP_PHRASE_BY_KIND[kind]}; the last reason: {self._reasons[kind]}"
                )
        return ""


def get_task_split(ref: TicketRef) -> TaskSplit:
    return "train" if ref.eval_step < 0 else "valid"


@dataclass(slots=True)
class FirstTicketsCheck:
    """Ends of the first tickets since the ledger or the trainer started, by task split.

    An evaluation may have an agent of its own, so each split is counted separately.
    """

    _failures: dict[TaskSplit, list[DropTicketRequest]] = field(default_factory=dict)
    _splits_with_working_agent: set[TaskSplit] = field(default_factory=set)

    def record_success(self, ref: TicketRef) -> None:
        self._splits_with_working_agent.add(get_task_split(ref))

    def record_failure(self, drop_request: DropTicketRequest) -> None:
        """Record a dropped ticket; an empty cause means that it was not the agent's fault.

        A cause other than an earlier one shows that the agent does not always fail alike.
        """
        split = get_task_split(drop_request.ref)
        failures = self._failures.setdefault(split, [])
        if not drop_request.cause:
            return
        if any(earlier.cause != drop_request.cause for earlier in failures):
            self._splits_with_working_agent.add(split)
        elif all(earlier.ref.ticket_id != drop_request.ref.ticket_id for earlier in failures):
            failures.append(drop_request)

    def find_problem(self) -> str:
        """Return the reason why the run cannot go on, or an empty string."""
        for split, failures in self._failures.items():
            if (
                split not in self._splits_with_working_agent
                and len(failures) >= ALIKE_FIRST_FAILURES_TO_STOP
            ):
                return (
                    f"the agent failed alike in the first {len(failures)} tickets; the last one: "
                    f"{failures[-1].reason}"
                )
        return ""
