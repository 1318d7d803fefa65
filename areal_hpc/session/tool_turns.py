"""Calls and results of a history, told by the ids of calls.

Clients hand a reply back with other seams: calls of two replies in one message, one reply's calls
in two, results as their tools end, a sentence where we said nothing. A template that prints no ids
would show results under the wrong calls, and the conversation would be none that we know.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.session.chat_template import Message

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

    def add_result(self, message: Message) -> bool:
        if not self._turns:
            return False
        call_id = message.get("tool_call_id")
        places = self._unanswered.get(call_id) if call_id is not None else None
        last_turn = next(reversed(self._turns.values()))
        (places.pop() if places else last_turn.others).append(message)
        return True

    def list_messages(self) -> Iterator[Message]:
        for turn in self._turns.values():
            yield from turn.list_messages()


def align_tool_turns(
    messages: Sequence[Message], reply_by_call_id: Mapping[str, Message]
) -> list[Message]:
    """The messages with each reply's calls in one message, then their results in that order.

    `reply_by_call_id` has the replies that are known. A message of the assistant that made no known
    call stays as it is, but for the order of its results.
    """
    aligned: list[Message] = []
    run = _ToolRun(reply_by_call_id)
    for message in messages:
        if message.get("tool_calls"):
            run.add_calls(message)
        elif message["role"] != "tool" or not run.add_result(message):
            aligned += run.list_messages()
            run = _ToolRun(reply_by_call_id)
            aligned.append(message)
    return [*aligned, *run.list_messages()]


def list_unpaired(messages: Sequence[Message]) -> list[str]:
    """What of a history has no partner: results without a call, calls without a result."""
    unanswered, found = Counter[str | None](), set[str]()
    for message in messages:
        unanswered.update(call.get("id") for call in message.get("tool_calls") or ())
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if unanswered[call_id] > 0:
                unanswered[call_id] -= 1
            else:
                found.add(UNKNOWN_CALL if call_id else MISSING_ID)
    is_unanswered = any(count for name, count in unanswered.items() if name is not None)
    return sorted(found | ({UNANSWERED_CALL} if is_unanswered else set()))
