"""Conversations of rows as text: messages, tool calls, rewards and times; groups side by side."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import takewhile

from rich.cells import cell_len, chop_cells, set_cell_size

from areal_hpc.errors import escape_controls
from areal_hpc.evaluation.set_names import split_ticket_id
from areal_hpc.view.transcripts.messages import (
    ShownMessage,
    list_call_facts,
    list_shown_messages,
)
from areal_hpc.view.transcripts.row_search import FoundRow
from areal_hpc.wire.trajectory import TrajectoryRow

MIN_COLUMN_WIDTH = 36
COLUMN_GAP = " │ "
INDENT = "  "


def format_groups(rows: Sequence[FoundRow], width: int) -> str:
    """Rows as conversations, in their order; rows of one group stand together, side by side."""
    groups: dict[tuple[int, int, int], list[tuple[FoundRow, TrajectoryRow]]] = {}
    for found in rows:
        row = found.read()
        groups.setdefault((row.eval_step, row.ticket_id, row.attempt), []).append((found, row))
    return "\n\n".join("\n".join(_format_group(group, width)) for group in groups.values())


def _format_group(group: Sequence[tuple[FoundRow, TrajectoryRow]], width: int) -> Iterator[str]:
    yield _format_group_title(group)
    messages = [list_shown_messages(row) for _, row in group]
    shared = list(
        takewhile(
            lambda alike: alike[0].role != "assistant" and all(one == alike[0] for one in alike),
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
        list(_format_row(found, row, own[len(shared) :], column_width))
        for (found, row), own in zip(group, messages, strict=True)
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
            yield COLUMN_GAP.join(set_cell_size(one, column_width) for one in cells).rstrip()


def _format_group_title(group: Sequence[tuple[FoundRow, TrajectoryRow]]) -> str:
    found, row = group[0]
    set_number, task = split_ticket_id(row.ticket_id)
    is_held_out = row.eval_step >= 0
    facts = [f"held-out task {task}" if is_held_out else f"ticket {row.ticket_id}"]
    if is_held_out and set_number:
        facts.append(f"evaluation set {set_number}")
    facts.append(f"attempt {row.attempt}")
    if (step := found.steps.find_step(row)) is not None:
        facts.append(f"step {step}")
    if not is_held_out and row.record.task_index >= 0:
        facts.append(f"task {row.record.task_index}")
    rewards = " ".join(f"{one.reward:g}" for _, one in group)
    return f"{', '.join(facts)}: reward {rewards}"


def _format_row(
    found: FoundRow, row: TrajectoryRow, messages: Sequence[ShownMessage], width: int
) -> Iterator[str]:
    facts = [
        *(f"row {found.number}", row.kind.label, f"episode {row.episode}"),
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
    for called in message.tool_calls:
        yield from _wrap_without_controls(f"→ {called}", width, INDENT)
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
