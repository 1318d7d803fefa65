"""Messages in normal form, their comparison, and calls and results in the order of their ids.

Clients hand a reply back with other seams: calls of two replies in one message, one reply's calls
in two, results as their tools end, a sentence where we said nothing. A template that prints no ids
would show results under the wrong calls, and the conversation would be none that we know.
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


def write_json_text(value: Any) -> str:
    """A value as JSON; a text stays what it is, as the arguments of a call that no client read."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _normalize_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    arguments = "" if arguments is None else write_json_text(arguments)
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


UNKNOWN_CALL = "tool_call_id (of no call)"
MISSING_ID = "tool_call_id (missing)"
UNANSWERED_CALL = "tool_calls (without a result)"
"""What is counted of a history that cannot be put in order."""
FILLER_TEXTS = ("[System: Empty message content sanitised to satisfy protocol]",)
"""What clients write where we said nothing: LiteLLM's."""
_TEXT_FIELDS = ("content", "reasoning_content")


@dataclass(slots=True, eq=False)
class _ToolTurn:
    message: Message
    reply: Message | None
    calls: dict[Any, tuple[dict[str, Any], list[Message]]] = field(default_factory=dict)
    """Each with its result, if there is one; ours by their ids."""
    others: list[Message] = field(default_factory=list)
    """Results that belong to no call."""

    def list_messages(self) -> Iterator[Message]:
        calls, message = self.calls, dict(self.message)
        if self.reply is not None:
            ids = [call.get("id") for call in self.reply["tool_calls"]]
            calls = {name: calls[name] for name in ids if name in calls}
            if len(calls) == len(ids):
                is_merged = len(message["tool_calls"]) > len(ids)
                message |= _find_our_texts(message, self.reply, is_merged)
        yield {**message, "tool_calls": [call for call, _ in calls.values()]}
        for _, result in calls.values():
            yield from result
        yield from self.others


def _find_our_texts(message: Message, reply: Message, is_merged: bool) -> dict[str, Any]:
    ours = {name: reply.get(name) or "" for name in _TEXT_FIELDS if message.get(name)}
    return {
        name: text
        for name, text in ours.items()
        if message[name] in FILLER_TEXTS or (is_merged and text.strip() in message[name])
    }


class _ToolRun:
    def __init__(self, reply_by_call_id: Mapping[str, Message]) -> None:
        self._reply_by_call_id = reply_by_call_id
        self._turns: dict[int, _ToolTurn] = {}
        """By the identity of the reply, or of a message that no known reply is."""
        self._unanswered: dict[str | None, list[list[Message]]] = {}
        """Places for the results of calls, by id."""

    def add_calls(self, message: Message) -> None:
        replies = [self._reply_by_call_id.get(one.get("id")) for one in message["tool_calls"]]
        is_known = None not in replies
        for i, (call, reply) in enumerate(zip(message["tool_calls"], replies, strict=True)):
            maker, name = (reply, call["id"]) if is_known else (None, i)
            turn = self._turns.setdefault(id(maker or message), _ToolTurn(message, maker))
            if name not in turn.calls:  # a client may repeat one
                turn.calls[name] = (call, [])
                self._unanswered.setdefault(call.get("id"), []).append(turn.calls[name][1])

    def add_result(self, message: Message) -> None:
        call_id = message.get("tool_call_id")
        places = self._unanswered.get(call_id) if call_id is not None else None
        last_turn = next(reversed(self._turns.values()))
        (places.pop() if places else last_turn.others).append(message)

    def list_messages(self) -> Iterator[Message]:
        for turn in self._turns.values():
            yield from turn.list_messages()


def align_tool_turns(
    messages: list[Message], reply_by_call_id: Mapping[str, Message]
) -> list[Message]:
    """The messages; where there are calls, each reply's in one message, then results in order.

    `reply_by_call_id` has the replies that are known. A message of the assistant that made no known
    call stays as it is, but for the order of its results.
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
    """True if there are calls or results of tools in messages."""
    for one in messages:  # noqa: SIM110  `any` takes twice as long
        if one["role"] == "tool" or "tool_calls" in one:
            return True
    return False


def list_unpaired(messages: Sequence[Message]) -> list[str]:
    """What of a history has no partner: results without a call, calls without a result."""
    if not _have_tool_calls(messages):
        return []
    unanswered, found = Counter[str | None](), set[str]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            unanswered[call.get("id")] += 1
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if unanswered[call_id] > 0:
                unanswered[call_id] -= 1
            else:
                found.add(UNKNOWN_CALL if call_id else MISSING_ID)
    is_unanswered = any(count for name, count in unanswered.items() if name is not None)
    return sorted(found | ({UNANSWERED_CALL} if is_unanswered else set()))
