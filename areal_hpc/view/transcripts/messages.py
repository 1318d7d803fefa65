"""Messages of recorded rows: their texts, their tool calls, and the model call of each reply."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_hpc.wire.trajectory import CallRecord, TrajectoryRow

Message = dict[str, Any]


def get_messages(row: TrajectoryRow) -> list[Message]:
    messages = row.meta.get("messages", [])
    candidates = messages if isinstance(messages, list) else []
    return [message for message in candidates if isinstance(message, dict)]


def describe_row(row: TrajectoryRow) -> dict[str, Any]:
    """Return what is recorded of a row beside its messages, calls and tokens."""
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
    """Yield each call with the index of its reply among the row's messages."""
    index = -1
    for call in calls:
        index += call.new_messages + 1
        yield index, call


@dataclass(frozen=True, slots=True)
class ShownMessage:
    role: str
    name: str
    text: str
    reasoning: str
    tool_calls: tuple[str, ...]
    """Tool calls as `name(arguments)`."""
    call: CallRecord | None
    """Model call whose reply this is."""

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
            call=calls.get(index),
        )
        for index, message in enumerate(get_messages(row))
    ]


def get_raw_tool_calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else [calls] if calls else []


def list_tool_schemas(row: TrajectoryRow) -> list[Any]:
    """Return the tools that calls of a row could call, each once, whichever calls had them."""
    offered = [
        tool
        for schemas in row.tool_schemas.values()
        for tool in (schemas if isinstance(schemas, list) else [schemas] if schemas else [])
    ]
    return list({msgspec.json.encode(tool, order="sorted"): tool for tool in offered}.values())


def _format_tool_call(raw_call: object) -> str:
    function = raw_call.get("function") if isinstance(raw_call, dict) else None
    if not isinstance(function, dict):  # an agent may send any type
        return extract_text(raw_call)
    return f"{function.get('name')}({extract_text(function.get('arguments'))})"


def list_call_facts(call: CallRecord) -> list[str]:
    facts = [f"agent {call.agent_id}"] if call.agent_id else []
    if call.answered_at:
        facts.append(f"{call.answered_at - call.asked_at:.2f} s")
    facts.append(f"{call.reply_tokens} tokens")
    if call.finish_reason not in ("", "stop"):
        facts.append(call.finish_reason)
    return facts


def extract_text(content: object) -> str:
    """Return the text of a message's content, or of arguments; name other parts by their type."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    return msgspec.json.encode(content).decode()
