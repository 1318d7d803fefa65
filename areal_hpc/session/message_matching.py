"""Message normalization and comparison."""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from areal_hpc.session.chat_template import Message

MessageRewriter = Callable[[Message], Message]
"""Maps a message in normal form to what is compared in its place, and rendered."""

_WIDE_NUMBER_PATTERN = re.compile(r"\d{19}")
"""Text that may hold an integer of more than 64 bits."""


def normalize_chat_message(message: Mapping[str, Any]) -> Message:
    """The normal form of a Chat Completions message.

    None fields are absent; content is a text (text parts are joined by line breaks, none is the
    empty text); the arguments of tool calls are JSON values, so that spacing does not matter.
    A field the template does not read, such as `refusal`, makes no difference. A developer is
    OpenAI's newer name for the system, which most templates do not know.
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
    """The normal form of a message of which the parts have been read."""
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


def _normalize_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    arguments = "" if arguments is None else arguments
    if not isinstance(arguments, str):  # a client has read them
        arguments = msgspec.json.encode(arguments).decode()
    # A malformed call stays the text it is, and so does one that no journal could hold.
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
"""What two messages are compared by, in the order in which a difference is named."""


def find_differing_field(recorded: Message, received: Message) -> str | None:
    """The first of `COMPARED_FIELDS` in which a message that came back is not the one we know.

    Both are in normal form. Ids of tool calls make no difference, because SDKs number calls
    anew and no call is told from another by its id alone; nor does reasoning that is missing,
    because most SDKs drop it, or that stands in the text, nor white space around text beside tool
    calls, nor the name that a framework gives its agent, nor arguments that a client adds to a call
    of ours: Claude Code writes out those that have defaults.
    """
    is_reply = recorded.get("role") == "assistant"
    for field in COMPARED_FIELDS:
        if (
            _get_comparable_value(recorded, field) != _get_comparable_value(received, field)
            and not (field == "reasoning_content" and field not in received)
            and not (field == "tool_calls" and _have_calls_with_added_arguments(recorded, received))
            and not (field == "name" and is_reply)
            and not (field == "content" and is_reply and _has_inlined_reasoning(recorded, received))
        ):
            return field
    return None


def _has_inlined_reasoning(recorded: Message, received: Message) -> bool:
    thought, _, text = received["content"].rpartition("</think>")
    reasoning = (recorded.get("reasoning_content") or "").strip()
    return bool(reasoning and reasoning in thought and text.strip() == recorded["content"].strip())


def _have_calls_with_added_arguments(recorded: Message, received: Message) -> bool:
    pairs = (recorded.get("tool_calls") or [], received.get("tool_calls") or [])
    return len(pairs[0]) == len(pairs[1]) and all(map(_is_call_with_added_arguments, *pairs))


def _is_call_with_added_arguments(recorded: Mapping[str, Any], received: Mapping[str, Any]) -> bool:
    given, more = recorded["function"]["arguments"], received["function"]["arguments"]
    return (
        recorded.get("id") is not None
        and (recorded["id"], recorded["function"]["name"])
        == (received.get("id"), received["function"]["name"])
        and isinstance(given, dict)
        and isinstance(more, dict)
        and given == {key: more[key] for key in given if key in more}
    )


def _get_comparable_value(message: Message, field: str) -> Any:
    value = message.get(field)
    if field == "tool_calls" and value:
        return [call["function"] for call in value]
    if field == "reasoning_content" or (field == "content" and message.get("tool_calls")):
        return (value or "").strip()
    return value


VOLATILE_LINE_PREFIXES = ("x-anthropic-billing-header:",)
"""How lines begin that a client writes anew into each request, and no model is meant to read."""


def strip_volatile_lines(text: str) -> str:
    """A system prompt without what changes from request to request, so that it can be continued.

    Claude Code puts a line with a hash of the whole request in front of it.
    """
    if not any(mark in text for mark in VOLATILE_LINE_PREFIXES):
        return text
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.lstrip().startswith(VOLATILE_LINE_PREFIXES))
