"""Search of the rows of a run or of one shard, and their text as conversations."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from rich.cells import cell_len, chop_cells, set_cell_size

from areal_hpc.errors import RecipeError, ShardError, escape_controls
from areal_hpc.evaluation.set_names import split_ticket_id
from areal_hpc.rundir.manifests import list_manifest_steps, read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.view.transcripts.messages import (
    ShownMessage,
    list_call_facts,
    list_shown_messages,
)
from areal_hpc.view.transcripts.row_index import RowIndex, name_own_group
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow


class StepByTicket:
    """Training steps of a run's tickets, read from its manifests at the first use."""

    def __init__(self, paths: RunPaths | None) -> None:
        self._paths = paths

    def find_step(self, row: TrajectoryRow) -> int | None:
        """Return the step that trained a row, or whose weights it evaluated."""
        if row.eval_step >= 0:
            return row.eval_step
        if row.kind is not RowKind.TRAIN:
            return None
        return self._steps.get((row.ticket_id, row.attempt))

    @cached_property
    def _steps(self) -> dict[tuple[int, int], int]:
        steps: dict[tuple[int, int], int] = {}
        if self._paths is None:
            return steps
        for step in list_manifest_steps(self._paths):
            try:
                tickets = read_manifest(self._paths, step).tickets
            except ShardError:
                continue  # areal-hpc audit reports it
            steps |= {(ticket.ref.ticket_id, ticket.ref.attempt): step for ticket in tickets}
        return steps


@dataclass(frozen=True, slots=True)
class FoundRow:
    reader: ShardReader
    row: int
    """Number of the row in its shard."""
    number: int
    """Number of the row over all shards of the run."""
    steps: StepByTicket

    def read(self) -> TrajectoryRow:
        (row,) = self.reader.read_rows([self.row])
        return row


@dataclass(frozen=True, slots=True)
class RowQuery:
    where: str = ""
    """Expression of `row_filter`; empty for all rows."""
    ticket_id: int | None = None
    """Ticket, for all its training rows and failed episodes."""
    row_number: int | None = None
    """Number over all shards, for one row."""
    sort_descending_by: str = ""
    """Field to sort by, largest first; empty for the recorded order."""
    max_rows: int | None = None


def find_rows(path: Path, query: RowQuery) -> tuple[list[FoundRow], int]:
    """Return the rows of a shard or run that a query selects, and the number of all matches.

    Without an order `max_rows` keeps the last rows, which are the newest of their cell.
    """
    if query.row_number is not None and (query.where or query.ticket_id is not None):
        raise RecipeError(
            "a row's number and a filter were given",
            key="--where" if query.where else "--ticket",
            hint="leave one of them out",
        )
    if path.is_file():
        run = RunPaths(path.parent.parent)
        readers, in_run = {path.name: ShardReader(path)}, path.parent == run.shards_dir
    else:
        run, in_run = RunPaths(path), True
        readers = {
            shard.file: ShardReader(run.shards_dir / shard.file)
            for shard in read_index(run.shard_index_dir)
        }
    first_rows, total = {}, 0
    for file, reader in readers.items():
        first_rows[file] = total
        total += reader.num_rows
    picked = [(file, row) for file, reader in readers.items() for row in range(reader.num_rows)]
    if query.row_number is not None:
        picked = picked[query.row_number :][:1] if query.row_number >= 0 else []
    elif query.where or query.sort_descending_by or query.ticket_id is not None:
        with closing(RowIndex(run, None)) as index:
            index.index_file(path) if path.is_file() else index.index_new_rows()
            matches = index.find_values(
                (),
                query.where,
                ticket_id=query.ticket_id,
                sort_descending_by=query.sort_descending_by,
            )
        picked = [(file, row) for file, row in matches if file in readers]
    if not picked and query.row_number is not None:
        hint = f"give a row from 0 to {total - 1}" if total else "wait for the first sealed shard"
        message = f"there is no row {query.row_number}: {path} holds {total} rows"
        raise RecipeError(message, key="row", hint=hint)
    if not picked and query.ticket_id is not None:
        message = f"{path} holds no row of ticket {query.ticket_id}"
        hint = "areal-hpc shards ls RUN --json lists the tickets of every shard"
        raise RecipeError(message, key="--ticket", hint=hint)
    matching = len(picked)
    if query.max_rows is not None:
        picked = picked[: query.max_rows] if query.sort_descending_by else picked[-query.max_rows :]
    steps = StepByTicket(run if in_run else None)
    rows = [FoundRow(readers[file], row, first_rows[file] + row, steps) for file, row in picked]
    return rows, matching


MIN_COLUMN_WIDTH = 36
COLUMN_GAP = " │ "
INDENT = "  "


def format_groups(rows: Sequence[FoundRow], width: int) -> str:
    """Format rows as conversations, in their order; rows of one group are side by side."""
    groups: dict[tuple[int, int, int, str], list[tuple[FoundRow, TrajectoryRow]]] = {}
    for found_row in rows:
        row = found_row.read()
        group = (row.eval_step, row.ticket_id, row.attempt, name_own_group(row))
        groups.setdefault(group, []).append((found_row, row))
    return "\n\n".join("\n".join(_format_group(group, width)) for group in groups.values())


def _format_group(group: Sequence[tuple[FoundRow, TrajectoryRow]], width: int) -> Iterator[str]:
    yield _format_group_title(group)
    messages = [list_shown_messages(row) for _, row in group]
    shared = list(
        takewhile(
            lambda peers: peers[0].role != "assistant" and all(peer == peers[0] for peer in peers),
            zip(*messages, strict=False),
        )
    )
    if len(group) == 1:
        shared = []
    for first, *_ in shared:
        yield from _format_message(first, width)
    columns = (width + len(COLUMN_GAP)) // (MIN_COLUMN_WIDTH + len(COLUMN_GAP))
    columns = max(1, min(len(group), columns))
    column_width = (width + len(COLUMN_GAP)) // columns - len(COLUMN_GAP)
    blocks = [
        list(_format_row(found_row, row, own_messages[len(shared) :], column_width))
        for (found_row, row), own_messages in zip(group, messages, strict=True)
    ]
    for begin in range(0, len(blocks), columns):
        yield ""
        side_by_side = blocks[begin : begin + columns]
        if len(side_by_side) == 1:
            yield from side_by_side[0]
            continue
        height = max(map(len, side_by_side))
        filled = [[*block, *[""] * (height - len(block))] for block in side_by_side]
        for cells in zip(*filled, strict=True):
            yield COLUMN_GAP.join(set_cell_size(cell, column_width) for cell in cells).rstrip()


def _format_group_title(group: Sequence[tuple[FoundRow, TrajectoryRow]]) -> str:
    found_row, row = group[0]
    rewards = " ".join(f"{other.reward:g}" for _, other in group)
    if own_group := name_own_group(row):
        return f"session {own_group}: reward {rewards}"
    set_number, task = split_ticket_id(row.ticket_id)
    is_held_out = row.eval_step >= 0
    facts = [f"held-out task {task}" if is_held_out else f"ticket {row.ticket_id}"]
    if is_held_out and set_number:
        facts.append(f"evaluation set {set_number}")
    facts.append(f"attempt {row.attempt}")
    if (step := found_row.steps.find_step(row)) is not None:
        facts.append(f"step {step}")
    if not is_held_out and row.record.task_index >= 0:
        facts.append(f"task {row.record.task_index}")
    return f"{', '.join(facts)}: reward {rewards}"


def _format_row(
    found_row: FoundRow, row: TrajectoryRow, messages: Sequence[ShownMessage], width: int
) -> Iterator[str]:
    facts = [
        *(f"row {found_row.number}", row.kind.label, f"episode {row.episode}"),
        *(f"reward {row.reward:g}", f"{row.loss_mask_T.sum()} of {row.num_tokens} tokens sampled"),
    ]
    if row.record.ended_at:
        facts.append(f"{row.record.ended_at - row.record.started_at:.1f} s")
    yield from _wrap_without_controls("── " + ", ".join(facts), width)
    for message in messages:
        yield from _format_message(message, width)
    if row.record.error:
        yield "failed"
        yield from _wrap_without_controls(row.record.error, width, INDENT)


def _format_message(message: ShownMessage, width: int) -> Iterator[str]:
    facts = f"  ({', '.join(list_call_facts(message.call))})" if message.call else ""
    yield from _wrap_without_controls(message.title + facts, width)
    if message.reasoning:
        yield from _wrap_without_controls(f"[reasoning] {message.reasoning}", width, INDENT)
    if message.text:
        yield from _wrap_without_controls(message.text, width, INDENT)
    for tool_call in message.tool_calls:
        yield from _wrap_without_controls(f"→ {tool_call}", width, INDENT)
    if message.call and (reward := message.call.reward):
        numbers = {**reward.parts, **reward.metrics}
        named = "".join(f", {name} {number:g}" for name, number in numbers.items())
        yield from _wrap_without_controls(f"= reward {reward.value:g}{named}", width, INDENT)
        if reward.note:
            yield from _wrap_without_controls(reward.note, width, INDENT * 2)


def _wrap_without_controls(text: str, width: int, indent: str = "") -> Iterator[str]:
    room = max(8, width - len(indent))
    for paragraph in text.split("\n"):
        shown = escape_controls(paragraph)
        for line in textwrap.wrap(shown, room, break_on_hyphens=False) or [""]:
            for piece in chop_cells(line, room) if cell_len(line) > room else [line]:
                yield (indent + piece).rstrip()
