"""Final status of every ticket: trained, dropped, open, lost or duplicated.

A ticket id is a position of the task stream (decision 0016), so every id below the highest one
with a trace was issued and must be accounted for. The audit queries no process and reads nothing
but the files that a restart of the run would read.

| status    | meaning                                                                          |
|-----------|----------------------------------------------------------------------------------|
| trained   | in exactly one batch that the newest checkpoint consumed, its rows sealed and there  |
| unsound   | likewise, but left out of what that batch was trained on, since a row of it is   |
|           | unfit (`trajectory.find_row_defect`)                                             |
| skipped   | likewise, but optimizer steps of that batch were not taken, since their gradient |
|           | was not finite                                                                   |
| quarantined | in a batch that the newest checkpoint consumed unread, or that the trainer will  |
|           | consume unread: `areal-hpc quarantine` named it, or no rank could read it        |
| duplicate | in more batches than one (or in one consumed twice), or sharing a row with       |
|           | another ticket of a batch: trained more often than once, now or on resume        |
| lost      | issued, but it will never be trained, or no file shows whether it was: its rows  |
|           | or the manifest that named them are gone, the checkpoints skipped its batch, or  |
|           | its id left no trace though later ones were batched and no cell can still hold it |
| dropped   | given up on, with the reason in `dropped_tickets.jsonl`                          |
| filtered  | its group was not accepted, with the reason in `dropped_tickets.jsonl`           |
| open      | batched, not in a checkpoint yet (replayed unchanged), sealed but in no batch,   |
|           | or without a trace and within what cells may hold (issued again on resume)       |

The open ids without a trace have a limit: while nothing is lost, an id is issued only when every
lower one is in a cell, sealed, batched or dropped, and admission keeps those in cells and those
not yet trained within `(max_head_offpolicyness + 1) * batch_size`. A whole batch of these must
have been sealed for a batch to form, so at most `max_head_offpolicyness * batch_size` ids below
the highest batched one are still in cells. When a run has finished, no cell holds anything.

The newest checkpoint is that of the highest step of the highest generation. Each checkpoint lists
all batches consumed since the first, so work of an abandoned generation does not count.
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
    """Parts of consumed batches that were not trained, and quarantined batches, with reasons."""
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
    """Newest checkpoint; of step 0 if there is none."""
    manifests: Mapping[int, BatchManifest] = field(default_factory=dict)
    drops: Mapping[int, str] = field(default_factory=dict)
    """Reason by ticket id, of tickets given up on."""
    filtered: Mapping[int, str] = field(default_factory=dict)
    """Reason by ticket id, of tickets whose group was not accepted."""
    quarantine_request_by_step: Mapping[int, UntrainedBatchPart] = field(default_factory=dict)
    shards: Sequence[SealedShard] = ()
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    is_finished: bool = False
    total_steps: int = 0
    batch_size: int = 0
    """0 if no recipe sets it."""
    max_head_offpolicyness: int = 0
    problems: Sequence[Problem] = ()


def read_ticket_records(paths: RunPaths) -> TicketRecords:
    """Read records of later stages first, so that in a live run none lacks its earlier ones."""
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
        with suppress(FileNotFoundError):  # renamed since it was listed
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
        max((recipe["trainer"].get("batch_size", 0) for recipe in recipes), default=0),
        max(
            ((recipe.get("rollout") or {}).get("max_head_offpolicyness", 0) for recipe in recipes),
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
    traces = _TicketTraces(records)
    tickets = [AuditedTicket(number, *traces.classify(number)) for number in range(traces.next_id)]
    doubts = [
        Problem(doubt, f"manifests/ step {step}", "restore the file from a copy")
        for step, doubt in traces.doubt_by_step.items()
    ]
    newest = records.checkpoint
    pending = (part for step, part in traces.quarantined.items() if step > newest.step)
    return AuditReport(
        tickets,
        [*records.problems, *doubts, *traces.never_issued],
        [*newest.untrained, *pending],
        newest.step,
        records.is_finished,
        Counter(episode.kind for shard in records.shards for episode in shard.untrained),
    )


class _TicketTraces:
    """Traces of all tickets, from which the status of each is derived."""

    def __init__(self, records: TicketRecords) -> None:
        self._records = records
        self._uses, self._shared = _collect_batch_uses(records)
        self._shards = {shard.file: shard for shard in records.shards}
        self._rows = {
            (shard.file, ticket.ticket_id, ticket.attempt): ticket.rows
            for shard in records.shards
            for ticket in shard.tickets
        }
        self._untrained_kinds = {
            (shard.file, row): episode.kind
            for shard in records.shards
            for episode in shard.untrained
            for row in episode.rows
        }
        self._sealed: dict[int, str] = {}
        for file, ticket_id, _ in self._rows:
            # The first line of a ticket counts: the ledger takes that one.
            self._sealed.setdefault(ticket_id, file)
        known = self._uses.keys() | records.drops.keys() | records.filtered.keys()
        self.never_issued = _pop_never_issued_ids(self._sealed, 1 + max(known, default=-1))
        known |= self._sealed.keys()
        self.next_id = 1 + max(known, default=-1)
        """Lowest id above all issued ones."""
        traceless = sorted(set(range(self.next_id)) - known)
        self._lost_ids = _find_lost_traceless_ids(records, traceless, max(self._uses, default=-1))
        self.doubt_by_step = _explain_doubtful_steps(records)
        self.quarantined = merge_quarantines(records.checkpoint, records.quarantine_request_by_step)
        # A dictionary: it is read for every ticket, and the checkpoint's lists grow with the run.
        self._consumed: dict[int, list[UntrainedBatchPart]] = {
            step: [] for step in records.checkpoint.consumed
        }
        for part in records.checkpoint.untrained:
            if part.step in self._consumed:
                self._consumed[part.step].append(part)

    def classify(self, ticket_id: int) -> tuple[TicketStatus, str]:
        records = self._records
        if ticket_id in self._uses:
            return self._classify_batched(self._uses[ticket_id], self._shared.get(ticket_id))
        if ticket_id in records.drops:
            return TicketStatus.DROPPED, records.drops[ticket_id]
        if ticket_id in records.filtered:
            return TicketStatus.FILTERED, records.filtered[ticket_id]
        if ticket_id in self._sealed:
            return self._classify_sealed(self._sealed[ticket_id])
        if ticket_id in self._lost_ids:
            return TicketStatus.LOST, "no record of it, and no cell can still hold it"
        why = "no record yet: running in a cell, or to be issued again on resume"
        return TicketStatus.OPEN, why

    def _classify_batched(
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
        quarantine = self.quarantined.get(step)
        if quarantine is None and (fault := self._find_ticket_fault(ticket)):
            return TicketStatus.LOST, f"{where}: {fault}"
        if step in self._consumed:
            if quarantine is not None:
                return TicketStatus.QUARANTINED, f"{where}: {quarantine.reason}"
            for part in self._consumed[step]:
                if ticket.ref.ticket_id in part.tickets:
                    return TicketStatus.UNSOUND, f"step {step}, {part.reason}"
                if not part.tickets:
                    return TicketStatus.SKIPPED, f"{where}: {part.reason}"
            return TicketStatus.TRAINED, where
        if step <= checkpoint.step:
            fault = f"the checkpoint of step {checkpoint.step} skipped that batch"
            return TicketStatus.LOST, f"{where}: {fault}"
        if self._records.is_finished and step <= self._records.total_steps:
            fault = "the run has finished, but no checkpoint holds that batch"
            return TicketStatus.LOST, f"{where}: {fault}"
        if quarantine is not None:
            reason = f"{quarantine.reason}; not in a checkpoint yet"
            return TicketStatus.QUARANTINED, f"{where}: {reason}"
        reason = "not in a checkpoint yet; the batch will be replayed unchanged"
        return TicketStatus.OPEN, f"{where}: {reason}"

    def _classify_sealed(self, file: str) -> tuple[TicketStatus, str]:
        if fault := self._find_shard_fault(file):
            return TicketStatus.LOST, f"sealed in {file}: {fault}"
        for doubt in self.doubt_by_step.values():
            return TicketStatus.LOST, f"sealed in {file}, perhaps trained: {doubt}"
        return TicketStatus.OPEN, f"sealed in {file}, in no batch yet"

    def _find_shard_fault(self, file: str) -> str:
        shard, actual_bytes = self._shards.get(file), self._records.file_bytes.get(file)
        if shard is None:
            return "the index does not list that shard"
        if actual_bytes is None:
            return "that shard is gone"
        if actual_bytes != shard.bytes:
            return f"that shard has {actual_bytes} bytes, expected {shard.bytes}"
        return ""

    def _find_ticket_fault(self, ticket: SealedTicket) -> str:
        if fault := self._find_shard_fault(ticket.shard):
            return fault
        for row in ticket.rows:
            if kind := self._untrained_kinds.get((ticket.shard, row)):
                return f"row {row} of that shard is of kind {kind} and not for training"
        indexed_rows = self._rows.get((ticket.shard, ticket.ref.ticket_id, ticket.ref.attempt))
        if indexed_rows != ticket.rows:
            return f"that shard holds {indexed_rows or 'no rows'} of the ticket"
        return ""


def _pop_never_issued_ids(
    shard_by_sealed_id: dict[int, str], first_unseen_id: int
) -> list[Problem]:
    """Remove ids that no ledger can have issued, and return a problem for each.

    `first_unseen_id` is above all ids in batches and drops. No run leaves a gap of a million ids
    without a trace, as ids are positions of the task stream.
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
    """Return the batches of each ticket, and the first owner of a row for tickets that share one.

    A batch that the checkpoint consumed twice counts twice. A batch that it did not consume counts
    once: it is pending, or was skipped.
    """
    times_consumed = Counter(records.checkpoint.consumed)
    uses: dict[int, list[_BatchUse]] = {}
    shared: dict[int, int] = {}
    owner_by_row: dict[tuple[str, int], int] = {}
    for step, manifest in records.manifests.items():
        for ticket in manifest.tickets:
            ticket_id = ticket.ref.ticket_id
            uses.setdefault(ticket_id, []).extend([(step, ticket)] * max(1, times_consumed[step]))
            for row in set(ticket.rows):
                owner = owner_by_row.setdefault((ticket.shard, row), ticket_id)
                if owner != ticket_id:
                    shared[ticket_id] = owner
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
    """Return the ids without a trace that no cell can hold: the oldest ones beyond the limit.

    Return none if the limit is unknown, as other users may be unable to read the recipe.
    """
    if records.is_finished:
        return set(traceless_ids)
    if records.batch_size == 0:
        return set()
    max_in_cells = records.max_head_offpolicyness * records.batch_size
    overtaken = [ticket_id for ticket_id in traceless_ids if ticket_id < highest_batched]
    return set(overtaken[: max(0, len(overtaken) - max_in_cells)])
