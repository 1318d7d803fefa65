"""Messages of recorded rows: which there are, what they say, and which model call each is of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_hpc.wire.trajectory import CallRecord, TrajectoryRow

Message = dict[str, Any]


def get_messages(row: TrajectoryRow) -> list[Message]:
    messages = row.meta.get("messages", [])
    return [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []


def describe_row(row: TrajectoryRow) -> dict[str, Any]:
    """What is recorded of a row beside its messages, calls and tokens."""
    record = row.record
    return {
        "kind": row.kind.label,
        "ticket": row.ticket_id,
        "attempt": row.attempt,
        "episode": row.episode,
        "task": record.task_index,
        "cell": record.cell,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "reward": row.reward,
        "temperature": row.temperature,
        "cause": record.cause,
        "error": record.error,
    }


def locate_calls(calls: Sequence[CallRecord]) -> Iterator[tuple[int, CallRecord]]:
    """Each call with the place of its reply among the row's messages."""
    place = -1
    for call in calls:
        place += call.new_messages + 1
        yield place, call


@dataclass(frozen=True, slots=True)
class ShownMessage:
    role: str
    name: str
    text: str
    reasoning: str
    tool_calls: tuple[str, ...]
    """Each as `name(arguments)`."""
    call: CallRecord | None
    """The model call that this is the reply of."""

    @property
    def title(self) -> str:
        return f"{self.role} {self.name}".rstrip()


def list_shown_messages(row: TrajectoryRow) -> list[ShownMessage]:
    calls = dict(locate_calls(row.record.calls))
    return [
        ShownMessage(
            role=str(message.get("role", "?")),
            name=str(message.get("name") or ""),
            text=extract_text(message.get("content")),
            reasoning=extract_text(message.get("reasoning_content")),
            tool_calls=tuple(map(_format_tool_call, get_raw_tool_calls(message))),
            call=calls.get(place),
        )
        for place, message in enumerate(get_messages(row))
    ]


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


def _format_tool_call(raw_call: object) -> str:
    function = raw_call.get("function") if isinstance(raw_call, dict) else None
    if not isinstance(function, dict):  # an agent may send any
        return extract_text(raw_call)
    return f"{function.get('name')}({extract_text(function.get('arguments'))})"


def list_call_facts(call: CallRecord) -> list[str]:
    facts = []
    if call.answered_at:
        facts.append(f"{call.answered_at - call.asked_at:.2f} s")
    facts.append(f"{call.reply_tokens} tokens")
    if call.finish_reason not in ("", "stop"):
        facts.append(call.finish_reason)
    return facts


def extract_text(content: object) -> str:
    """The text of a message's content, or of arguments; parts of other kinds by their type."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [one for one in content if isinstance(one, dict)]
        return "\n".join(str(one.get("text") or f"[{one.get('type')}]") for one in parts)
    return msgspec.json.encode(content).decode()
