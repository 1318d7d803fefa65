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
|           | or without a trace and within what cells may hold (issued again on resume)       |

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from areal_hpc.errors import Problem, ShardError
from areal_hpc.rundir.checkpoints import TrainerState, UntrainedBatchPart, list_checkpoints
from areal_hpc.rundir.manifests import (
    list_manifest_steps,
    merge_quarantines,
    read_drops,
    read_manifest,
    read_quarantine_files,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import read_run_recipe
from areal_hpc.shards.index import SealedShard, read_index
from areal_hpc.wire.ledger import BatchManifest, SealedTicket

NO_CHECKPOINT = TrainerState(step=0, generation=0, seed=0)
MAX_TRACELESS_ID_GAP = 1_000_000
_BatchUse = tuple[int, SealedTicket]


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


@dataclass(frozen=True, slots=True)
class TicketRecords:
    checkpoint: TrainerState = NO_CHECKPOINT
    """The newest; of step 0 when there is none."""
    manifests: Mapping[int, BatchManifest] = field(default_factory=dict)
    drops: Mapping[int, str] = field(default_factory=dict)
    """Ticket id -> reason, of tickets given up on."""
    filtered: Mapping[int, str] = field(default_factory=dict)
    """Ticket id -> reason, of tickets whose group was not accepted."""
    quarantine_request_by_step: Mapping[int, UntrainedBatchPart] = field(default_factory=dict)
    shards: Sequence[SealedShard] = ()
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    is_finished: bool = False
    total_steps: int = 0
    batch_size: int = 0
    """0 when no recipe says it."""
    max_head_offpolicyness: int = 0
    problems: Sequence[Problem] = ()


def read_ticket_records(paths: RunPaths) -> TicketRecords:
    """Read against the flow of a ticket, so that in a live run no later trace lacks an earlier."""
    problems: list[Problem] = []
    is_finished = paths.finished_marker.exists()
    checkpoints = list_checkpoints(paths.checkpoints_dir, problems)
    newest = checkpoints[-1].state if checkpoints else NO_CHECKPOINT
    if sorted(newest.consumed) != list(range(1, newest.step + 1)):
        message = (
            f"the checkpoint of step {newest.step} consumed batches {newest.consumed}; "
            f"expected each of 1 to {newest.step} exactly once"
        )
        problems.append(Problem(message, str(paths.checkpoints_dir)))
    quarantined = read_quarantine_files(paths, problems)
    manifests = dict(_iterate_readable_manifests(paths, problems))
    reasons: dict[str, dict[int, str]] = {"filtered": {}, "": {}}
    for drop in read_drops(paths):
        reasons.get(drop.kind, reasons[""]).setdefault(drop.ref.ticket_id, drop.reason)
    shards = read_index(paths.shard_index_dir)
    file_bytes = {}
    for path in paths.shards_dir.iterdir() if paths.shards_dir.is_dir() else ():
        with suppress(FileNotFoundError):  # got its final name just now; the index has it by then
            file_bytes[path.name] = path.stat().st_size
    # Recipes of all launches, as plain YAML: an old run must be auditable by newer code.
    recipes = [read_run_recipe(path) for path in paths.list_recipe_files()]
    newest_recipe = read_run_recipe(paths.recipe) if paths.recipe.exists() else {"trainer": {}}
    return TicketRecords(
        newest,
        manifests,
        reasons[""],
        reasons["filtered"],
        quarantined,
        shards,
        file_bytes,
        is_finished,
        newest_recipe["trainer"].get("total_steps", 0),
        max((one["trainer"].get("batch_size", 0) for one in recipes), default=0),
        max(
            ((one.get("rollout") or {}).get("max_head_offpolicyness", 0) for one in recipes),
            default=0,
        ),
        problems,
    )


def _iterate_readable_manifests(
    paths: RunPaths, problems: list[Problem]
) -> Iterator[tuple[int, BatchManifest]]:
    for step in list_manifest_steps(paths):
        try:
            manifest = read_manifest(paths, step)
        except ShardError as error:
            problems += error.problems
            continue
        if manifest.step != step:
            message = f"expected the batch of step {step}, got {manifest.step}"
            problems.append(Problem(message, str(paths.manifest(step))))
        yield step, manifest


def audit_run(paths: RunPaths) -> AuditReport:
    return classify_tickets(read_ticket_records(paths))


def classify_tickets(records: TicketRecords) -> AuditReport:
    judge = _Judge(records)
    tickets = [AuditedTicket(one, *judge.judge(one)) for one in range(judge.position)]
    doubts = [
        Problem(wrong, f"manifests/ step {step}", "restore the file from a copy")
        for step, wrong in judge.doubt_by_step.items()
    ]
    newest = records.checkpoint
    ordered = (one for step, one in judge.quarantined.items() if step > newest.step)
    return AuditReport(
        tickets,
        [*records.problems, *doubts, *judge.invented],
        [*newest.untrained, *ordered],
        newest.step,
        records.is_finished,
        Counter(one.kind for shard in records.shards for one in shard.untrained),
    )


class _Judge:
    """Traces of tickets, by which the status of each is told."""

    def __init__(self, records: TicketRecords) -> None:
        self._records = records
        self._uses, self._shared = _collect_batch_uses(records)
        self._shards = {shard.file: shard for shard in records.shards}
        self._rows = {
            (shard.file, one.ticket_id, one.attempt): one.rows
            for shard in records.shards
            for one in shard.tickets
        }
        self._untrained_kinds = {
            (shard.file, row): one.kind
            for shard in records.shards
            for one in shard.untrained
            for row in one.rows
        }
        self._sealed: dict[int, str] = {}
        for file, ticket_id, _ in self._rows:
            # The first line of a ticket counts: the ledger takes that one.
            self._sealed.setdefault(ticket_id, file)
        known = self._uses.keys() | records.drops.keys() | records.filtered.keys()
        self.invented = _pop_never_issued_ids(self._sealed, 1 + max(known, default=-1))
        known |= self._sealed.keys()
        self.position = 1 + max(known, default=-1)
        """Above all ids that were issued."""
        traceless = sorted(set(range(self.position)) - known)
        self._strays = _find_lost_traceless_ids(records, traceless, max(self._uses, default=-1))
        self.doubt_by_step = _explain_doubtful_steps(records)
        self.quarantined = merge_quarantines(records.checkpoint, records.quarantine_request_by_step)
        # Looked up for every ticket: lists of the checkpoint grow with the run.
        self._consumed: dict[int, list[UntrainedBatchPart]] = {
            step: [] for step in records.checkpoint.consumed
        }
        for part in records.checkpoint.untrained:
            if part.step in self._consumed:
                self._consumed[part.step].append(part)

    def judge(self, ticket_id: int) -> tuple[TicketStatus, str]:
        records = self._records
        if ticket_id in self._uses:
            return self._judge_batched(self._uses[ticket_id], self._shared.get(ticket_id))
        if ticket_id in records.drops:
            return TicketStatus.DROPPED, records.drops[ticket_id]
        if ticket_id in records.filtered:
            return TicketStatus.FILTERED, records.filtered[ticket_id]
        if ticket_id in self._sealed:
            return self._judge_sealed(self._sealed[ticket_id])
        if ticket_id in self._strays:
            return TicketStatus.LOST, "no record of it, and no cell can still hold it"
        why = "no record yet: running in a cell, or to be issued again on resume"
        return TicketStatus.OPEN, why

    def _judge_batched(
        self, batch_uses: list[_BatchUse], shares_with: int | None
    ) -> tuple[TicketStatus, str]:
        step, ticket = batch_uses[0]
        checkpoint = self._records.checkpoint
        where = f"step {step}, {ticket.shard} rows {ticket.rows}"
        if len(batch_uses) > 1:
            steps = " and ".join(str(step) for step, _ in batch_uses)
            return TicketStatus.DUPLICATE, f"in the batches of steps {steps}"
        if shares_with is not None:
            return TicketStatus.DUPLICATE, f"{where}: some rows also belong to ticket {shares_with}"
        set_aside = self.quarantined.get(step)
        if set_aside is None and (fault := self._find_ticket_fault(ticket)):
            return TicketStatus.LOST, f"{where}: {fault}"
        if step in self._consumed:
            if set_aside is not None:
                return TicketStatus.QUARANTINED, f"{where}: {set_aside.reason}"
            for one in self._consumed[step]:
                if ticket.ref.ticket_id in one.tickets:
                    return TicketStatus.UNSOUND, f"step {step}, {one.reason}"
                if not one.tickets:
                    return TicketStatus.SKIPPED, f"{where}: {one.reason}"
            return TicketStatus.TRAINED, where
        if step <= checkpoint.step:
            fault = f"the checkpoint of step {checkpoint.step} skipped that batch"
            return TicketStatus.LOST, f"{where}: {fault}"
        if self._records.is_finished and step <= self._records.total_steps:
            fault = "the run has finished, but no checkpoint holds that batch"
            return TicketStatus.LOST, f"{where}: {fault}"
        if set_aside is not None:
            reason = f"{set_aside.reason}; not in a checkpoint yet"
            return TicketStatus.QUARANTINED, f"{where}: {reason}"
        reason = "not in a checkpoint yet; the batch will be replayed unchanged"
        return TicketStatus.OPEN, f"{where}: {reason}"

    def _judge_sealed(self, file: str) -> tuple[TicketStatus, str]:
        if fault := self._find_shard_fault(file):
            return TicketStatus.LOST, f"sealed in {file}: {fault}"
        for doubt in self.doubt_by_step.values():
            return TicketStatus.LOST, f"sealed in {file}, perhaps trained: {doubt}"
        return TicketStatus.OPEN, f"sealed in {file}, in no batch yet"

    def _find_shard_fault(self, file: str) -> str:
        shard, found_bytes = self._shards.get(file), self._records.file_bytes.get(file)
        if shard is None:
            return "the index does not list that shard"
        if found_bytes is None:
            return "that shard is gone"
        if found_bytes != shard.bytes:
            return f"that shard has {found_bytes} bytes, expected {shard.bytes}"
        return ""

    def _find_ticket_fault(self, ticket: SealedTicket) -> str:
        if fault := self._find_shard_fault(ticket.shard):
            return fault
        for row in ticket.rows:
            if kind := self._untrained_kinds.get((ticket.shard, row)):
                return f"row {row} of that shard is of kind {kind} and not for training"
        held = self._rows.get((ticket.shard, ticket.ref.ticket_id, ticket.ref.attempt))
        if held != ticket.rows:
            return f"that shard holds {held or 'no rows'} of the ticket"
        return ""


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
    records: TicketRecords,
) -> tuple[dict[int, list[_BatchUse]], dict[int, int]]:
    """Every batching of each ticket; and who takes a row that another ticket took before.

    A batch that the checkpoint consumed twice counts twice; one it did not consume counts once:
    it is pending, or was passed over.
    """
    times = Counter(records.checkpoint.consumed)
    uses: dict[int, list[_BatchUse]] = {}
    shared: dict[int, int] = {}
    holder: dict[tuple[str, int], int] = {}
    for step, manifest in records.manifests.items():
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


def _explain_doubtful_steps(records: TicketRecords) -> dict[int, str]:
    doubts = {}
    for step in range(1, 1 + max((records.checkpoint.step, *records.manifests))):
        manifest = records.manifests.get(step)
        if manifest is None:
            doubts[step] = f"the manifest of step {step} is missing"
        elif len(manifest.tickets) != records.batch_size > 0:
            doubts[step] = (
                f"the manifest of step {step} names {len(manifest.tickets)} tickets, "
                f"expected {records.batch_size}"
            )
    return doubts


def _find_lost_traceless_ids(
    records: TicketRecords, traceless_ids: list[int], highest_batched: int
) -> set[int]:
    """Of the ids without a trace, those that no cell can hold: the oldest beyond the limit.

    Nothing while the limit is not known: a recipe may be its owner's alone.
    """
    if records.is_finished:
        return set(traceless_ids)
    if records.batch_size == 0:
        return set()
    most_in_cells = records.max_head_offpolicyness * records.batch_size
    overtaken = [ticket_id for ticket_id in traceless_ids if ticket_id < highest_batched]
    return set(overtaken[: max(0, len(overtaken) - most_in_cells)])
