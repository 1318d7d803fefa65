"""Counts of dropped tickets; detects that no batch can form, or that the agent never works."""

from collections import Counter
from dataclasses import dataclass, field

from areal_hpc.rundir.manifests import DropKind, DroppedTicket
from areal_hpc.wire.ledger import DropTicketRequest, IrregularTicketCounts, TaskSplit, TicketRef

MAX_FAILED_STREAK_BATCHES = 2
"""Batches' worth of tickets that all failed: the agent does not work."""
MAX_REJECTED_STREAK_BATCHES = 20
"""Batches' worth of tickets that worked and were all turned away."""
MIN_REJECTED_STREAK_TICKETS = 100
"""At least so many: a small batch is unlucky more often."""

ALIKE_FIRST_FAILURES_TO_STOP = 3
"""So many first tickets that failed alike end the run."""

_DROP_PHRASE_BY_KIND: dict[DropKind, str] = {
    "failed": "tickets in a row failed",
    "filtered": "groups in a row were filtered out: the tasks are too hard or "
    "too easy for the model, or rollout.should_accept rejects everything",
    "stale": "tickets were dropped as stale (rollout.stale_groups) without forming a batch",
}


class DropStats:
    """Which tickets came to nothing and why, how many since the last batch, how many in a row."""

    def __init__(self, batch_size: int) -> None:
        max_rejected = max(MIN_REJECTED_STREAK_TICKETS, MAX_REJECTED_STREAK_BATCHES * batch_size)
        self._most: dict[DropKind, int] = dict.fromkeys(_DROP_PHRASE_BY_KIND, max_rejected)
        self._most["failed"] = MAX_FAILED_STREAK_BATCHES * batch_size
        self._kind_of: dict[int, DropKind] = {}
        self._total: Counter[DropKind] = Counter()
        self._reported: Counter[DropKind] = Counter()  # in manifests
        self._in_a_row: Counter[DropKind] = Counter()
        self._reasons: dict[DropKind, str] = {}

    def count_drops(self, *kinds: DropKind) -> int:
        return sum(self._total[kind] for kind in kinds)

    def get_drop_kind(self, ticket_id: int) -> DropKind | None:
        return self._kind_of.get(ticket_id)

    def record_drop(self, dropped_ticket: DroppedTicket) -> None:
        self._kind_of[dropped_ticket.ref.ticket_id] = dropped_ticket.kind
        self._total[dropped_ticket.kind] += 1
        self._in_a_row[dropped_ticket.kind] += 1
        self._reasons[dropped_ticket.kind] = dropped_ticket.reason
        if dropped_ticket.kind == "filtered":  # its agent works
            self._in_a_row["failed"] = 0

    def record_settled_ticket(self) -> None:
        self._in_a_row["failed"] = self._in_a_row["filtered"] = 0

    def mark_reported_in_manifest(self, counts: IrregularTicketCounts) -> None:
        """A batch was formed, and its manifest says this."""
        self._in_a_row["stale"] = 0
        self._reported.update(
            stale=counts.stale_dropped,
            filtered=counts.filtered,
            failed=counts.failed,
        )

    def reset_streaks(self) -> None:
        self._in_a_row.clear()

    def build_batch_counts(self, stale_trained: int) -> IrregularTicketCounts:
        """Counts for the next batch's manifest, of tickets that are not in it."""
        since = self._total - self._reported
        return IrregularTicketCounts(
            stale_trained=stale_trained,
            stale_dropped=since["stale"],
            filtered=since["filtered"],
            failed=since["failed"],
        )

    def find_problem(self) -> str:
        """Why no batch will form, when tickets do nothing but come to nothing; else empty."""
        for kind, count in self._in_a_row.items():
            if count >= self._most[kind]:
                return (
                    f"{count} {_DROP_PHRASE_BY_KIND[kind]}; the last reason: {self._reasons[kind]}"
                )
        return ""


def get_task_split(ref: TicketRef) -> TaskSplit:
    return "train" if ref.eval_step < 0 else "valid"


@dataclass(slots=True)
class FirstTicketsCheck:
    """How the first tickets of each task set ended, since the ledger or the trainer started.

    An evaluation may have an agent of its own, so each task set counts for itself.
    """

    _failures: dict[TaskSplit, list[DropTicketRequest]] = field(default_factory=dict)
    _splits_with_working_agent: set[TaskSplit] = field(default_factory=set)

    def record_success(self, ref: TicketRef) -> None:
        self._splits_with_working_agent.add(get_task_split(ref))

    def record_failure(self, drop_request: DropTicketRequest) -> None:
        """A ticket was given up; without a cause that was not its agent's doing.

        Another cause than before shows that the agent does not always fail alike.
        """
        split = get_task_split(drop_request.ref)
        failures = self._failures.setdefault(split, [])
        if not drop_request.cause:
            return
        if any(one.cause != drop_request.cause for one in failures):
            self._splits_with_working_agent.add(split)
        elif all(one.ref.ticket_id != drop_request.ref.ticket_id for one in failures):
            failures.append(drop_request)

    def find_problem(self) -> str:
        """Why the run cannot go on; empty if it can."""
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
