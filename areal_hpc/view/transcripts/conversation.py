"""Conversations of rows as text: messages, tool calls, rewards and times; groups side by side."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import msgspec
from rich.cells import cell_len, chop_cells, set_cell_size

from areal_hpc.errors import escape_controls
from areal_hpc.evaluation.ticket_numbers import split_ticket_id
from areal_hpc.view.transcripts.row_search import FoundRow
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.row_record import CallRecord
from areal_hpc.wire.trajectory import TrajectoryRow

MIN_COLUMN_WIDTH = 36
COLUMN_GAP = " │ "
INDENT = "  "

Message = dict[str, Any]


def format_groups(rows: Sequence[FoundRow], width: int) -> str:
    """Rows as conversations, in their order; rows of one group stand together, side by side."""
    groups: dict[tuple[int, int, int], list[FoundRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return "\n\n".join("\n".join(_format_group(group, width)) for group in groups.values())


def _format_group(found_rows: Sequence[FoundRow], width: int) -> Iterator[str]:
    yield _format_group_title(found_rows)
    rows = [one.read() for one in found_rows]
    shared = _count_shared_prompt_messages(rows) if len(rows) > 1 else 0
    for message in get_messages(rows[0])[:shared]:
        yield from _format_message(message, width)
    columns = max(
        1, min(len(rows), (width + len(COLUMN_GAP)) // (MIN_COLUMN_WIDTH + len(COLUMN_GAP)))
    )
    column_width = (width + len(COLUMN_GAP)) // columns - len(COLUMN_GAP)
    for begin in range(0, len(rows), columns):
        yield ""
        pairs = zip(found_rows[begin : begin + columns], rows[begin : begin + columns], strict=True)
        blocks = [list(_format_rest_of_row(one, row, shared, column_width)) for one, row in pairs]
        yield from _join_side_by_side(blocks, column_width) if len(blocks) > 1 else blocks[0]


def _format_group_title(found_rows: Sequence[FoundRow]) -> str:
    first = found_rows[0]
    eval_step, ticket_id, attempt = first.group
    set_number, task = split_ticket_id(ticket_id)
    facts = [f"held-out task {task}" if eval_step >= 0 else f"ticket {ticket_id}"]
    if eval_step >= 0 and set_number:
        facts.append(f"evaluation set {set_number}")
    facts.append(f"attempt {attempt}")
    if first.trained_or_evaluated_step is not None:
        facts.append(f"step {first.trained_or_evaluated_step}")
    if eval_step < 0 and first.record.task_index >= 0:
        facts.append(f"task {first.record.task_index}")
    rewards = " ".join(f"{one.get_field('reward'):g}" for one in found_rows)
    return f"{', '.join(facts)}: reward {rewards}"


def _count_shared_prompt_messages(rows: Sequence[TrajectoryRow]) -> int:
    together = zip(*map(get_messages, rows), strict=False)
    alike = takewhile(
        lambda ones: ones[0].get("role") != "assistant" and all(one == ones[0] for one in ones),
        together,
    )
    return sum(1 for _ in alike)


def get_messages(row: TrajectoryRow) -> list[Message]:
    messages = row.meta.get("messages", [])
    return [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []


def _format_rest_of_row(
    found_row: FoundRow, row: TrajectoryRow, shared_messages: int, width: int
) -> Iterator[str]:
    yield from _wrap_without_controls(_format_row_title(found_row), width)
    calls = dict(locate_calls(found_row.record.calls))
    for place, message in enumerate(get_messages(row)):
        if place >= shared_messages:
            yield from _format_message(message, width, calls.get(place))
    if found_row.record.error:
        yield "failed"
        yield from _wrap_without_controls(found_row.record.error, width, INDENT)


def _format_row_title(found_row: FoundRow) -> str:
    facts = [f"row {found_row.number}", found_row.kind.label]
    facts.append(f"episode {found_row.get_field('episode')}")
    facts.append(f"reward {found_row.get_field('reward'):g}")
    facts.append(
        f"{found_row.get_field('length'):g} of {found_row.get_field('tokens'):g} tokens sampled"
    )
    seconds = found_row.get_field("seconds")
    if isinstance(seconds, float):
        facts.append(f"{seconds:.1f} s")
    return "── " + ", ".join(facts)


def locate_calls(calls: Sequence[CallRecord]) -> Iterator[tuple[int, CallRecord]]:
    """Each call with the place of its reply among the row's messages."""
    place = -1
    for call in calls:
        place += call.new_messages + 1
        yield place, call


def _format_message(message: Message, width: int, call: CallRecord | None = None) -> Iterator[str]:
    title = str(message.get("role", "?"))
    if name := message.get("name"):
        title += f" {name}"
    facts = _list_call_facts(call) if call else []
    yield from _wrap_without_controls(f"{title}  ({', '.join(facts)})" if facts else title, width)
    if reasoning := message.get("reasoning_content"):
        yield from _wrap_without_controls(f"[reasoning] {reasoning}", width, INDENT)
    if text := extract_text(message.get("content")):
        yield from _wrap_without_controls(text, width, INDENT)
    for called in get_raw_tool_calls(message):
        yield from _wrap_without_controls(f"→ {format_tool_call(called)}", width, INDENT)
    if call and call.reward:
        yield from _format_reward(call.reward, width)


def get_raw_tool_calls(message: Message) -> list[Any]:
    called = message.get("tool_calls")
    return called if isinstance(called, list) else [called] if called else []


def list_tool_schemas(row: TrajectoryRow) -> list[Any]:
    """The tools that calls of a row could call, each once, whichever of the calls had them."""
    offered = [
        tool
        for schemas in row.tool_schemas.values()
        for tool in (schemas if isinstance(schemas, list) else [schemas] if schemas else [])
    ]
    return list({msgspec.json.encode(tool, order="sorted"): tool for tool in offered}.values())


def format_tool_call(raw_call: object) -> str:
    """A called tool as `name(arguments)`."""
    function = raw_call.get("function") if isinstance(raw_call, dict) else None
    if not isinstance(function, dict):  # an agent may send any
        return extract_text(raw_call)
    return f"{function.get('name')}({extract_text(function.get('arguments'))})"


def _list_call_facts(call: CallRecord) -> list[str]:
    facts = []
    if call.answered_at:
        facts.append(f"{call.answered_at - call.asked_at:.2f} s")
    facts.append(f"{call.reply_tokens} tokens")
    if call.finish_reason not in ("", "stop"):
        facts.append(call.finish_reason)
    return facts


def _format_reward(reward: Reward, width: int) -> Iterator[str]:
    numbers = {**reward.parts, **reward.metrics}
    named = "".join(f", {name} {number:g}" for name, number in numbers.items())
    yield from _wrap_without_controls(f"= reward {reward.value:g}{named}", width, INDENT)
    if reward.note:
        yield from _wrap_without_controls(reward.note, width, INDENT * 2)


def extract_text(content: object) -> str:
    """The text of a message's content, or of arguments; parts of other kinds by their type."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [one for one in content if isinstance(one, dict)]
        return "\n".join(str(one.get("text") or f"[{one.get('type')}]") for one in parts)
    return msgspec.json.encode(content).decode()


def _wrap_without_controls(text: str, width: int, indent: str = "") -> Iterator[str]:
    room = max(8, width - len(indent))
    for paragraph in text.split("\n"):
        shown = escape_controls(paragraph)
        for line in textwrap.wrap(shown, room, break_on_hyphens=False) or [""]:
            for piece in chop_cells(line, room) if cell_len(line) > room else [line]:
                yield (indent + piece).rstrip()


def _join_side_by_side(blocks: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    height = max(map(len, blocks))
    filled = [[*block, *[""] * (height - len(block))] for block in blocks]
    for cells in zip(*filled, strict=True):
        yield COLUMN_GAP.join(set_cell_size(one, width) for one in cells).rstrip()
