"""Final status of every ticket: trained, dropped, open, lost or duplicated.

A ticket id is a position of the task stream (decision 0016), so the ids below the highest one
that left a trace are all there ever were: each must be accounted for. No process is asked, and
nothing that a ledger remembers is believed: only what a restart would find.

| status    | meaning                                                                          |
|-----------|----------------------------------------------------------------------------------|
| trained   | in exactly one batch that the newest checkpoint consumed, its rows sealed and there  |
| unsound   | likewise, but left out of what that batch was trained on, since a row of it is   |
|           | unfit (`trajectory.find_row_defect`)                                             |
| skipped   | likewise, but optimizer steps of that batch were not taken, since their gradient |
|           | was not finite                                                                   |
| quarantined | in a batch that the newest checkpoint consumed unread, or that the trainer will  |
|           | consume unread: `areal-hpc quarantine` asked for it, or no rank could read it    |
| duplicate | in more batches than one (or in one consumed twice), or sharing a row with       |
|           | another ticket of a batch: trained more often than once, now or on resume        |
| lost      | issued, and nobody will ever train it, or nobody can tell whether it was: its    |
|           | rows or the manifest that named them are gone, the checkpoints passed over its batch,|
|           | or its id left no trace though later ones were batched and no cell can still     |
|           | hold it                                                                          |
| dropped   | given up on, with the reason in `dropped_tickets.jsonl`                          |
| filtered  | its group was not accepted, with the reason in `dropped_tickets.jsonl`           |
| open      | batched, not in a checkpoint yet (replayed unchanged), sealed but in no batch,   |
|           | or without a trace and within what cells may hold (issued again on resume), or   |
|           | its rows were too old and it is issued again                                     |

How many ids without a trace can be open: while nothing is lost, an id is issued only when every
lower one is in a cell, sealed, batched or dropped, and admission keeps those in cells and those
not yet trained within `(max_head_offpolicyness + 1) * batch_size`. A whole batch of these must
have been sealed for a batch to form, so at most `max_head_offpolicyness * batch_size` ids below
the highest batched one are still in cells. When a run has finished, no cell holds anything.

The chain is that of the newest checkpoint: of the highest step of the highest generation. Each
checkpoint lists the batches behind it from the first, so work of an abandoned generation does not
count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from areal_hpc.errors import Problem
from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.rundir.manifests import merge_quarantines
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.audit.ticket_history_reader import TicketRecordsOfRun, read_ticket_records
from areal_hpc.wire.ledger import SealedTicket


class TicketStatus(StrEnum):
    """Final status of a ticket; the module's table defines each."""

    TRAINED = "trained"
    UNSOUND = "unsound"
    SKIPPED = "skipped"
    QUARANTINED = "quarantined"
    DUPLICATE = "duplicate"
    LOST = "lost"
    DROPPED = "dropped"
    FILTERED = "filtered"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class AuditedTicket:
    ticket_id: int
    status: TicketStatus
    why: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    tickets: list[AuditedTicket]
    problems: list[Problem]
    untrained: list[UntrainedBatchPart]
    """What consumed batches did not teach, and batches that are not to be trained, and why: no
    fault of the accounts, but worth knowing."""
    checkpoint_step: int
    has_run_finished: bool
    non_training_episodes_by_kind: Mapping[str, int]

    def list_tickets_with_status(self, status: TicketStatus) -> list[AuditedTicket]:
        return [ticket for ticket in self.tickets if ticket.status is status]

    @property
    def is_consistent(self) -> bool:
        return not (
            self.list_tickets_with_status(TicketStatus.DUPLICATE)
            or self.list_tickets_with_status(TicketStatus.LOST)
            or self.problems
        )

    @property
    def summary_line(self) -> str:
        count = Counter(ticket.status for ticket in self.tickets)
        return (
            f"trained_once={count[TicketStatus.TRAINED]} "
            f"duplicates={count[TicketStatus.DUPLICATE]} "
            f"lost={count[TicketStatus.LOST]} open={count[TicketStatus.OPEN]}"
        )


MAX_TRACELESS_ID_GAP = 1_000_000
_BatchUse = tuple[int, SealedTicket]


def audit_run(paths: RunPaths) -> AuditReport:
    return classify_tickets(read_ticket_records(paths))


def classify_tickets(evidence: TicketRecordsOfRun) -> AuditReport:
    uses, shared = _collect_batch_uses(evidence)
    sealed: dict[int, str] = {}
    for shard in evidence.shards:
        for one in shard.tickets:  # the first line of a ticket counts: the ledger takes that one
            sealed.setdefault(one.ticket_id, shard.file)
    given_up = {**evidence.drops, **evidence.filtered}
    invented = _pop_never_issued_ids(sealed, 1 + max((*uses, *given_up), default=-1))
    position = 1 + max((*uses, *sealed, *given_up), default=-1)
    doubtful = _explain_doubtful_steps(evidence)
    traceless = set(range(position)) - uses.keys() - sealed.keys() - given_up.keys()
    strays = _find_lost_traceless_ids(evidence, sorted(traceless), max(uses, default=-1))
    rows = _ShardIndexChecker(evidence)
    quarantined = merge_quarantines(evidence.checkpoint, evidence.quarantine_request_by_step)
    # Looked up for every ticket: lists of the checkpoint grow with the run.
    consumed: dict[int, list[UntrainedBatchPart]] = {
        step: [] for step in evidence.checkpoint.consumed
    }
    for part in evidence.checkpoint.untrained:
        if part.step in consumed:
            consumed[part.step].append(part)
    tickets = []
    for ticket_id in range(position):
        if ticket_id in uses:
            status, why = _judge_batched(
                evidence, rows, consumed, quarantined, uses[ticket_id], shared.get(ticket_id)
            )
        elif ticket_id in evidence.drops:
            status, why = TicketStatus.DROPPED, evidence.drops[ticket_id]
        elif ticket_id in evidence.filtered:
            status, why = TicketStatus.FILTERED, evidence.filtered[ticket_id]
        elif ticket_id in sealed:
            status, why = _judge_sealed(rows, sealed[ticket_id], doubtful)
        elif ticket_id in strays:
            status, why = TicketStatus.LOST, "no record of it, and no cell can still hold it"
        else:
            why = "no record yet: running in a cell, or to be issued again on resume"
            status = TicketStatus.OPEN
        tickets.append(AuditedTicket(ticket_id, status, why))
    doubts = [
        Problem(wrong, f"manifests/ step {step}", "restore the file from a copy")
        for step, wrong in doubtful.items()
    ]
    problems, newest = [*evidence.problems, *doubts, *invented], evidence.checkpoint
    ordered = (one for step, one in quarantined.items() if step > newest.step)
    untrained = [*newest.untrained, *ordered]
    episodes = Counter(one.kind for shard in evidence.shards for one in shard.untrained)
    return AuditReport(tickets, problems, untrained, newest.step, evidence.is_finished, episodes)


def _pop_never_issued_ids(
    shard_by_sealed_id: dict[int, str], first_unseen_id: int
) -> list[Problem]:
    """Take out the ids that no ledger can have issued, and name them.

    `first_unseen_id` is above all known ids, which are positions of the task stream. Nobody plays a
    million of them without a trace.
    """
    problems = []
    for ticket_id in sorted(shard_by_sealed_id):
        if 0 <= ticket_id < first_unseen_id + MAX_TRACELESS_ID_GAP:
            first_unseen_id = max(first_unseen_id, ticket_id + 1)
        else:
            message = f"holds ticket {ticket_id}, which was never issued"
            problems.append(Problem(message, shard_by_sealed_id.pop(ticket_id)))
    return problems


def _collect_batch_uses(
    evidence: TicketRecordsOfRun,
) -> tuple[dict[int, list[_BatchUse]], dict[int, int]]:
    """Every batching of each ticket; and who takes a row that another ticket took before.

    A batch that the checkpoint consumed twice counts twice; one it did not consume counts once:
    it is pending, or was passed over.
    """
    times = Counter(evidence.checkpoint.consumed)
    uses: dict[int, list[_BatchUse]] = {}
    shared: dict[int, int] = {}
    holder: dict[tuple[str, int], int] = {}
    for step, manifest in evidence.manifests.items():
        for ticket in manifest.tickets:
            ticket_id = ticket.ref.ticket_id
            uses.setdefault(ticket_id, []).extend([(step, ticket)] * max(1, times[step]))
            for row in set(ticket.rows):
                other = holder.setdefault((ticket.shard, row), ticket_id)
                if other != ticket_id:
                    shared[ticket_id] = other
            if len(set(ticket.rows)) < len(ticket.rows):
                shared[ticket_id] = ticket_id
    return uses, shared


def _explain_doubtful_steps(evidence: TicketRecordsOfRun) -> dict[int, str]:
    doubts = {}
    for step in range(1, 1 + max((evidence.checkpoint.step, *evidence.manifests))):
        manifest = evidence.manifests.get(step)
        if manifest is None:
            doubts[step] = f"the manifest of step {step} is missing"
        elif len(manifest.tickets) != evidence.batch_size > 0:
            doubts[step] = (
                f"the manifest of step {step} names {len(manifest.tickets)} tickets, "
                f"expected {evidence.batch_size}"
            )
    return doubts


def _find_lost_traceless_ids(
    evidence: TicketRecordsOfRun, traceless_ids: list[int], highest_batched: int
) -> set[int]:
    """Of the ids without a trace, those that no cell can hold: the oldest beyond the limit.

    Nothing while the limit is not known: a recipe may be its owner's alone.
    """
    if evidence.is_finished:
        return set(traceless_ids)
    if evidence.batch_size == 0:
        return set()
    most_in_cells = evidence.max_head_offpolicyness * evidence.batch_size
    overtaken = [ticket_id for ticket_id in traceless_ids if ticket_id < highest_batched]
    return set(overtaken[: max(0, len(overtaken) - most_in_cells)])


def _judge_batched(
    evidence: TicketRecordsOfRun,
    rows: _ShardIndexChecker,
    consumed: Mapping[int, Sequence[UntrainedBatchPart]],
    quarantined: Mapping[int, UntrainedBatchPart],
    batch_uses: list[_BatchUse],
    shares_with: int | None,
) -> tuple[TicketStatus, str]:
    step, ticket = batch_uses[0]
    checkpoint = evidence.checkpoint
    where = f"step {step}, {ticket.shard} rows {ticket.rows}"
    if len(batch_uses) > 1:
        steps = " and ".join(str(step) for step, _ in batch_uses)
        return TicketStatus.DUPLICATE, f"in the batches of steps {steps}"
    if shares_with is not None:
        return TicketStatus.DUPLICATE, f"{where}: some rows also belong to ticket {shares_with}"
    set_aside = quarantined.get(step)
    if set_aside is None and (fault := rows.find_ticket_fault(ticket)):
        return TicketStatus.LOST, f"{where}: {fault}"
    if step in consumed:
        if set_aside is not None:
            return TicketStatus.QUARANTINED, f"{where}: {set_aside.reason}"
        return _judge_consumed(consumed[step], ticket, step, where)
    if step <= checkpoint.step:
        fault = f"the checkpoint of step {checkpoint.step} skipped that batch"
        return TicketStatus.LOST, f"{where}: {fault}"
    if evidence.is_finished and step <= evidence.total_steps:
        fault = "the run has finished, but no checkpoint holds that batch"
        return TicketStatus.LOST, f"{where}: {fault}"
    if set_aside is not None:
        reason = f"{set_aside.reason}; not in a checkpoint yet"
        return TicketStatus.QUARANTINED, f"{where}: {reason}"
    reason = "not in a checkpoint yet; the batch will be replayed unchanged"
    return TicketStatus.OPEN, f"{where}: {reason}"


def _judge_consumed(
    untrained: Sequence[UntrainedBatchPart], ticket: SealedTicket, step: int, location: str
) -> tuple[TicketStatus, str]:
    for one in untrained:
        if ticket.ref.ticket_id in one.tickets:
            return TicketStatus.UNSOUND, f"step {step}, {one.reason}"
        if not one.tickets:
            return TicketStatus.SKIPPED, f"{location}: {one.reason}"
    return TicketStatus.TRAINED, location


def _judge_sealed(
    rows: _ShardIndexChecker, file: str, doubt_by_step: dict[int, str]
) -> tuple[TicketStatus, str]:
    if fault := rows.find_shard_fault(file):
        return TicketStatus.LOST, f"sealed in {file}: {fault}"
    if doubt_by_step:
        doubt = next(iter(doubt_by_step.values()))
        return TicketStatus.LOST, f"sealed in {file}, perhaps trained: {doubt}"
    return TicketStatus.OPEN, f"sealed in {file}, in no batch yet"


class _ShardIndexChecker:
    def __init__(self, evidence: TicketRecordsOfRun) -> None:
        self._shards = {shard.file: shard for shard in evidence.shards}
        self._file_bytes = evidence.file_bytes
        self._places = {
            (shard.file, one.ticket_id, one.attempt): one.rows
            for shard in evidence.shards
            for one in shard.tickets
        }
        self._untrained_kinds = {
            (shard.file, row): one.kind
            for shard in evidence.shards
            for one in shard.untrained
            for row in one.rows
        }

    def find_shard_fault(self, file: str) -> str:
        shard = self._shards.get(file)
        if shard is None:
            return "the index does not list that shard"
        found_bytes = self._file_bytes.get(file)
        if found_bytes is None:
            return "that shard is gone"
        if found_bytes != shard.bytes:
            return f"that shard has {found_bytes} bytes, expected {shard.bytes}"
        return ""

    def find_ticket_fault(self, ticket: SealedTicket) -> str:
        if fault := self.find_shard_fault(ticket.shard):
            return fault
        for row in ticket.rows:
            if kind := self._untrained_kinds.get((ticket.shard, row)):
                return f"row {row} of that shard is of kind {kind} and not for training"
        held = self._places.get((ticket.shard, ticket.ref.ticket_id, ticket.ref.attempt))
        if held != ticket.rows:
            return f"that shard holds {held or 'no rows'} of the ticket"
        return ""
