"""Search of the rows of a run, or of one shard, by what is known of each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_hpc.errors import RecipeError, ShardError
from areal_hpc.rundir.manifests import list_manifest_steps, read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.view.transcripts.filter_expression import FieldValue, parse_filter
from areal_hpc.wire.row_record import RowRecord
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow

PART_PREFIX, METRIC_PREFIX = "part.", "metric."


class StepByTicket:
    """Training steps of a run's tickets, read from its manifests when first asked for."""

    def __init__(self, paths: RunPaths | None) -> None:
        self._paths = paths

    def find_step(self, ticket_id: int, attempt: int) -> int | None:
        return self._steps.get((ticket_id, attempt))

    @cached_property
    def _steps(self) -> dict[tuple[int, int], int]:
        steps: dict[tuple[int, int], int] = {}
        if self._paths is None:
            return steps
        for step in list_manifest_steps(self._paths):
            try:
                tickets = read_manifest(self._paths, step).tickets
            except ShardError:
                continue  # areal-hpc audit names it
            steps |= {(one.ref.ticket_id, one.ref.attempt): step for one in tickets}
        return steps


class SearchedShard:
    """One shard of a search. What its rows hold is read when a field first needs it."""

    def __init__(self, path: Path, first_row: int, steps: StepByTicket) -> None:
        self.path, self.first_row, self.steps = path, first_row, steps
        self.reader = ShardReader(path)
        self._columns: dict[str, list[Any]] = {}
        self._records: list[RowRecord] = []
        self._is_searched = True

    def end_search(self) -> None:
        self._columns, self._records, self._is_searched = {}, [], False

    def expect_search(self) -> None:
        self._is_searched = True

    def get_value(self, column: str, row: int) -> Any:
        if column not in self._columns:
            self._columns[column] = self.reader.read_column(column).tolist()
        return self._columns[column][row]

    def get_record(self, row: int) -> RowRecord:
        """The episode and the calls of a row."""
        if not self._is_searched:
            return self.reader.read_records([row])[0]
        if not self._records:
            self._records = self.reader.read_records()
        return self._records[row]

    def count_sampled_tokens(self, row: int) -> int:
        """Tokens of a row that the model said."""
        if "sampled" not in self._columns:
            mask, bounds = self.reader.read_column("loss_mask"), self.reader.read_column("offsets")
            totals = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
            self._columns["sampled"] = (totals[bounds[1:]] - totals[bounds[:-1]]).tolist()
        return int(self._columns["sampled"][row])


@dataclass(frozen=True, slots=True)
class FoundRow:
    """One row of a shard, with the fields that filters and tables ask for."""

    shard: SearchedShard
    row: int
    """In its shard."""

    @property
    def number(self) -> int:
        return self.shard.first_row + self.row

    @property
    def record(self) -> RowRecord:
        return self.shard.get_record(self.row)

    @property
    def kind(self) -> RowKind:
        return RowKind(self.shard.get_value("kind", self.row))

    @property
    def group(self) -> tuple[int, int, int]:
        names = ("eval_step", "ticket_id", "attempt")
        step, ticket, attempt = (self.shard.get_value(name, self.row) for name in names)
        return step, ticket, attempt

    @property
    def trained_or_evaluated_step(self) -> int | None:
        """The step that it was trained in, or whose weights were evaluated."""
        eval_step, ticket_id, attempt = self.group
        if eval_step >= 0:
            return eval_step
        if self.kind is not RowKind.TRAIN:
            return None
        return self.shard.steps.find_step(ticket_id, attempt)

    def get_field(self, field_name: str) -> FieldValue:
        """The value of a field that `get_field_type` knows."""
        for prefix, attribute in ((PART_PREFIX, "parts"), (METRIC_PREFIX, "metrics")):
            if field_name.startswith(prefix):
                return self._find_reward_number(attribute, field_name.removeprefix(prefix))
        return ROW_FIELDS[field_name].read(self)

    def _find_reward_number(self, attribute: str, metric_name: str) -> float | None:
        for call in reversed(self.record.calls):
            found: Mapping[str, float] = getattr(call.reward, attribute) if call.reward else {}
            if metric_name in found:
                return found[metric_name]
        return None

    def read(self) -> TrajectoryRow:
        (row,) = self.shard.reader.read_rows([self.row])
        return row


@dataclass(frozen=True, slots=True)
class RowField:
    """Something known of a row, by which rows are chosen and put in order."""

    type: type[float] | type[str]
    description: str
    read: Callable[[FoundRow], FieldValue]


def _make_column_reader(column_name: str) -> Callable[[FoundRow], FieldValue]:
    def read(found_row: FoundRow) -> FieldValue:
        value: float = found_row.shard.get_value(column_name, found_row.row)
        return value

    return read


def _get_duration_s(found_row: FoundRow) -> float | None:
    record = found_row.record
    return record.ended_at - record.started_at if record.ended_at else None


def _get_notes(found_row: FoundRow) -> str:
    return "\n".join(call.reward.note for call in found_row.record.calls if call.reward)


def _get_messages_json(found_row: FoundRow) -> str:
    return msgspec.json.encode(found_row.read().meta.get("messages")).decode()


def _count_tokens(found_row: FoundRow) -> float:
    first, end = (
        found_row.shard.get_value("offsets", row) for row in (found_row.row, found_row.row + 1)
    )
    return float(end - first)


ROW_FIELDS: dict[str, RowField] = {
    "kind": RowField(str, "train, evaluation, failed or auxiliary", lambda one: one.kind.label),
    "step": RowField(
        float,
        "the step that trained it, or whose weights were evaluated",
        lambda one: one.trained_or_evaluated_step,
    ),
    "ticket": RowField(float, "the ticket", _make_column_reader("ticket_id")),
    "attempt": RowField(float, "which issue of the ticket", _make_column_reader("attempt")),
    "episode": RowField(float, "which episode of the ticket", _make_column_reader("episode")),
    "reward": RowField(float, "the row's reward", _make_column_reader("reward")),
    "length": RowField(
        float, "tokens that the model said", lambda one: one.shard.count_sampled_tokens(one.row)
    ),
    "tokens": RowField(float, "all tokens", _count_tokens),
    "calls": RowField(float, "model calls", lambda one: len(one.record.calls) or None),
    "seconds": RowField(float, "how long its episode took", _get_duration_s),
    "task": RowField(
        float,
        "line of the task set, from 0",
        lambda one: one.record.task_index if one.record.task_index >= 0 else None,
    ),
    "cell": RowField(str, "the cell that played it", lambda one: one.record.cell),
    "finish": RowField(
        str,
        "how its last reply ended: stop, length or abort",
        lambda one: one.record.calls[-1].finish_reason if one.record.calls else None,
    ),
    "cause": RowField(
        str, "of a failed one: the exception and its line", lambda one: one.record.cause
    ),
    "note": RowField(str, "the notes of its rewards", _get_notes),
    "text": RowField(str, "its messages, as JSON", _get_messages_json),
}
FIELD_NAMES_FOR_HELP = [*ROW_FIELDS, f"{PART_PREFIX}NAME", f"{METRIC_PREFIX}NAME"]


def get_field_type(field_name: str) -> type[float] | type[str] | None:
    if field_name.startswith((PART_PREFIX, METRIC_PREFIX)):
        return float
    return ROW_FIELDS[field_name].type if field_name in ROW_FIELDS else None


@dataclass(frozen=True, slots=True)
class RowQuery:
    """Which rows are wanted, and in which order."""

    where: str = ""
    """An expression of `filter_expression`; all rows when empty."""
    ticket_id: int | None = None
    """All training rows and failed episodes of one ticket."""
    row_number: int | None = None
    """One row, counted over all shards."""
    sort_descending_by: str = ""
    """A field, largest first; as recorded when empty."""
    max_rows: int | None = None


def find_rows(path: Path, query: RowQuery) -> tuple[list[FoundRow], int]:
    """The rows of a shard or of a run's sealed shards that a query wants, and how many match.

    Without an order the last ones are taken, which are the newest of their cell.

    Raises:
        RecipeError: The query is none, or there is no such row or ticket.
        ShardError: A shard is damaged.
    """
    wanted = (
        parse_filter(query.where, get_field_type, FIELD_NAMES_FOR_HELP) if query.where else None
    )
    if query.sort_descending_by and get_field_type(query.sort_descending_by) is None:
        raise RecipeError(
            f"there is no field {query.sort_descending_by!r}",
            key="--sort",
            hint=f"sort by one of {', '.join(FIELD_NAMES_FOR_HELP)}",
        )
    found: list[tuple[FieldValue, FoundRow]] = []
    total = 0
    for shard in _iterate_shards(path):
        for row in _list_rows_of_number_or_ticket(shard, query):
            if wanted is None or wanted.holds(row):
                found.append(
                    (
                        row.get_field(query.sort_descending_by)
                        if query.sort_descending_by
                        else None,
                        row,
                    )
                )
        shard.end_search()
        total += shard.reader.num_rows
    if not found:
        _raise_if_number_or_ticket_was_asked(path, query, total)
    if query.sort_descending_by:
        with_key = [one for one in found if one[0] is not None]
        without = [one for one in found if one[0] is None]
        # All keys of one field have one type.
        with_key.sort(key=lambda one: one[0], reverse=True)  # type: ignore[arg-type,return-value]
        rows = [row for _, row in (*with_key, *without)][: query.max_rows]
    else:
        rows = [row for _, row in found][-query.max_rows if query.max_rows else 0 :]
    return rows, len(found)


def _list_rows_of_number_or_ticket(shard: SearchedShard, query: RowQuery) -> list[FoundRow]:
    rows = [FoundRow(shard, row) for row in range(shard.reader.num_rows)]
    if query.row_number is not None:
        rows = [row for row in rows if row.number == query.row_number]
    if query.ticket_id is not None:
        rows = [row for row in rows if row.group[:2] == (-1, query.ticket_id)]
    return rows


def _raise_if_number_or_ticket_was_asked(path: Path, query: RowQuery, total: int) -> None:
    if query.row_number is not None:
        raise RecipeError(
            f"there is no row {query.row_number}: {path} holds {total} rows",
            key="row",
            hint=f"give a row from 0 to {total - 1}"
            if total
            else "wait for the first sealed shard",
        )
    if query.ticket_id is not None:
        raise RecipeError(
            f"{path} holds no row of ticket {query.ticket_id}",
            key="--ticket",
            hint="areal-hpc shards ls RUN --json lists the tickets of every shard",
        )


def _iterate_shards(path: Path) -> Iterator[SearchedShard]:
    if path.is_file():
        run = RunPaths(path.parent.parent)
        shard = SearchedShard(path, 0, StepByTicket(run if path.parent == run.shards_dir else None))
        yield shard
        return
    paths, first_row = RunPaths(path), 0
    steps = StepByTicket(paths)
    for line in read_index(paths.shard_index_dir):
        yield SearchedShard(paths.shards_dir / line.file, first_row, steps)
        first_row += line.rows
