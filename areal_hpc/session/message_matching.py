"""Normal form of messages, their comparison, and the order of tool calls and their results.

Clients return a recorded reply in other forms: calls of two replies in one message, one reply's
calls in two, results in the order in which tools end, a text where the reply had none. A template
without ids would show results under the wrong calls, and no recorded conversation would match.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from areal_hpc.session.chat_template import Message

MessageRewriter = Callable[[Message], Message]
"""Function from a message in normal form to the one to compare and render in its place."""

_WIDE_NUMBER_PATTERN = re.compile(r"\d{19}")
"""Pattern of an integer that may have more than 64 bits."""


def normalize_chat_message(message: Mapping[str, Any]) -> Message:
    """Return the normal form of a Chat Completions message.

    Fields that are None are absent; content is a text (text parts are joined by line breaks, none
    is the empty text); arguments of tool calls are JSON values, so that spacing does not matter.
    Fields that no template reads, such as `refusal`, are absent. The role `developer`, OpenAI's
    newer name for `system`, becomes `system`, because most templates lack it.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    return build_normal_message(
        message["role"],
        content,
        message.get("name"),
        message.get("tool_call_id"),
        message.get("reasoning_content"),
        message.get("tool_calls"),
    )


def build_normal_message(
    role: str,
    content: str,
    sender_name: str | None = None,
    tool_call_id: str | None = None,
    reasoning_content: str | None = None,
    tool_calls: Iterable[Mapping[str, Any]] | None = None,
) -> Message:
    """Return the normal form of a message with these parts."""
    normal: Message = {"role": "system" if role == "developer" else role, "content": content}
    if sender_name is not None:
        normal["name"] = sender_name
    if tool_call_id is not None:
        normal["tool_call_id"] = tool_call_id
    if reasoning_content is not None:
        normal["reasoning_content"] = reasoning_content
    if tool_calls:
        normal["tool_calls"] = [_normalize_tool_call(call) for call in tool_calls]
    return normal


def write_json_text(value: Any) -> str:
    """Write a value as JSON; a text is returned unchanged, such as arguments that are not JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _normalize_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    arguments = "" if arguments is None else write_json_text(arguments)
    # Malformed arguments stay a text, as do those with a number too wide for the journal.
    with contextlib.suppress(msgspec.DecodeError, RecursionError, OverflowError):
        value = msgspec.json.decode(arguments)
        if _WIDE_NUMBER_PATTERN.search(arguments):
            msgspec.msgpack.encode(value)
        arguments = value
    normal = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is not None:
        normal["id"] = call["id"]
    return normal


COMPARED_FIELDS = ("role", "content", "tool_calls", "reasoning_content", "name")
"""Fields by which two messages are compared, in this order."""


def find_differing_field(recorded: Message, received: Message) -> str | None:
    """Return the first of `COMPARED_FIELDS` in which a received message differs from the recorded.

    Both are in normal form. These make no difference: ids of tool calls, because SDKs number calls
    anew; missing reasoning, because most SDKs drop it, or reasoning within the text; white space
    around text beside tool calls; the name that a framework gives its agent; arguments that a
    client adds to a recorded call (Claude Code writes out those that have defaults).
    """
    is_reply = recorded.get("role") == "assistant"
    for name in COMPARED_FIELDS:
        if (
            _get_comparable_value(recorded, name) != _get_comparable_value(received, name)
            and not (name == "reasoning_content" and name not in received)
            and not (name == "tool_calls" and _have_calls_with_added_arguments(recorded, received))
            and not (name == "name" and is_reply)
            and not (name == "content" and is_reply and _has_inlined_reasoning(recorded, received))
        ):
            return name
    return None


def _has_inlined_reasoning(recorded: Message, received: Message) -> bool:
    thought, _, text = received["content"].rpartition("</think>")
    reasoning = (recorded.get("reasoning_content") or "").strip()
    return bool(reasoning and reasoning in thought and text.strip() == recorded["content"].strip())


def _have_calls_with_added_arguments(recorded: Message, received: Message) -> bool:
    pairs = (recorded.get("tool_calls") or [], received.get("tool_calls") or [])
    return len(pairs[0]) == len(pairs[1]) and all(map(_is_call_with_added_arguments, *pairs))


def _is_call_with_added_arguments(recorded: Mapping[str, Any], received: Mapping[str, Any]) -> bool:
    before, after = recorded["function"]["arguments"], received["function"]["arguments"]
    return (
        recorded.get("id") is not None
        and (recorded["id"], recorded["function"]["name"])
        == (received.get("id"), received["function"]["name"])
        and isinstance(before, dict)
        and isinstance(after, dict)
        and before == {key: after[key] for key in before if key in after}
    )


def _get_comparable_value(message: Message, field: str) -> Any:
    value = message.get(field)
    if field == "tool_calls" and value:
        return [call["function"] for call in value]
    if field == "reasoning_content" or (field == "content" and message.get("tool_calls")):
        return (value or "").strip()
    return value


VOLATILE_LINE_PREFIXES = ("x-anthropic-billing-header:",)
"""Prefixes of lines that a client writes anew into each request, and not for the model."""


def strip_volatile_lines(text: str) -> str:
    """Remove the lines of a system prompt that change from request to request.

    Claude Code begins it with a hash of the whole request; no later request would continue it.
    """
    if not any(prefix in text for prefix in VOLATILE_LINE_PREFIXES):
        return text
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.lstrip().startswith(VOLATILE_LINE_PREFIXES))


UNKNOWN_CALL = "tool_call_id (of no call)"
MISSING_ID = "tool_call_id (missing)"
UNANSWERED_CALL = "tool_calls (without a result)"
"""Names of defects that are counted in a history whose calls and results do not pair."""
FILLER_TEXTS = ("[System: Empty message content sanitised to satisfy protocol]",)
"""Texts that clients put in place of an empty content: LiteLLM's."""
_TEXT_FIELDS = ("content", "reasoning_content")


@dataclass(slots=True, eq=False)
class _ToolTurn:
    message: Message
    reply: Message | None
    calls: dict[Any, tuple[dict[str, Any], list[Message]]] = field(default_factory=dict)
    """Calls, each with its results; by id if the reply is recorded, else by index."""
    others: list[Message] = field(default_factory=list)
    """Results that belong to no call."""

    def list_messages(self) -> Iterator[Message]:
        calls, message = self.calls, dict(self.message)
        if self.reply is not None:
            ids = [call.get("id") for call in self.reply["tool_calls"]]
            calls = {name: calls[name] for name in ids if name in calls}
            if len(calls) == len(ids):
                is_merged = len(message["tool_calls"]) > len(ids)
                message |= _find_recorded_texts(message, self.reply, is_merged)
        yield {**message, "tool_calls": [call for call, _ in calls.values()]}
        for _, results in calls.values():
            yield from results
        yield from self.others


def _find_recorded_texts(message: Message, reply: Message, is_merged: bool) -> dict[str, Any]:
    recorded = {name: reply.get(name) or "" for name in _TEXT_FIELDS if message.get(name)}
    return {
        name: text
        for name, text in recorded.items()
        if message[name] in FILLER_TEXTS or (is_merged and text.strip() in message[name])
    }


class _ToolRun:
    def __init__(self, reply_by_call_id: Mapping[str, Message]) -> None:
        self._reply_by_call_id = reply_by_call_id
        self._turns: dict[int, _ToolTurn] = {}
        """Turns by the identity of the recorded reply, or of the message without one."""
        self._unanswered: dict[str | None, list[list[Message]]] = {}
        """Empty lists for the results of calls, by call id."""

    def add_calls(self, message: Message) -> None:
        replies = [self._reply_by_call_id.get(call.get("id")) for call in message["tool_calls"]]
        is_recorded = None not in replies
        for i, (call, reply) in enumerate(zip(message["tool_calls"], replies, strict=True)):
            source, key = (reply, call["id"]) if is_recorded else (None, i)
            turn = self._turns.setdefault(id(source or message), _ToolTurn(message, source))
            if key not in turn.calls:  # a client may repeat a call
                turn.calls[key] = (call, [])
                self._unanswered.setdefault(call.get("id"), []).append(turn.calls[key][1])

    def add_result(self, message: Message) -> None:
        call_id = message.get("tool_call_id")
        results = self._unanswered.get(call_id) if call_id is not None else None
        last_turn = next(reversed(self._turns.values()))
        (results.pop() if results else last_turn.others).append(message)

    def list_messages(self) -> Iterator[Message]:
        for turn in self._turns.values():
            yield from turn.list_messages()


def align_tool_turns(
    messages: list[Message], reply_by_call_id: Mapping[str, Message]
) -> list[Message]:
    """Return the messages with the calls of each reply in one message, and their results in order.

    `reply_by_call_id` has the recorded replies. An assistant's message without a recorded call
    stays as it is, but for the order of its results.
    """
    if not _have_tool_calls(messages):
        return messages
    aligned: list[Message] = []
    run: _ToolRun | None = None
    for message in messages:
        if message.get("tool_calls"):
            run = run or _ToolRun(reply_by_call_id)
            run.add_calls(message)
        elif run is not None and message["role"] == "tool":
            run.add_result(message)
        else:
            if run is not None:
                aligned += run.list_messages()
                run = None
            aligned.append(message)
    return aligned if run is None else [*aligned, *run.list_messages()]


def _have_tool_calls(messages: Sequence[Message]) -> bool:
    """Return whether messages contain calls or results of tools."""
    for message in messages:  # noqa: SIM110  `any` takes twice as long
        if message["role"] == "tool" or "tool_calls" in message:
            return True
    return False


def list_unpaired(messages: Sequence[Message]) -> list[str]:
    """Return the names of defects in a history: results without a call, calls without a result."""
    if not _have_tool_calls(messages):
        return []
    unanswered, defects = Counter[str | None](), set[str]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            unanswered[call.get("id")] += 1
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if unanswered[call_id] > 0:
                unanswered[call_id] -= 1
            else:
                defects.add(UNKNOWN_CALL if call_id else MISSING_ID)
    is_unanswered = any(count for call_id, count in unanswered.items() if call_id is not None)
    return sorted(defects | ({UNANSWERED_CALL} if is_unanswered else set()))
