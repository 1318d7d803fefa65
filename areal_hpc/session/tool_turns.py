"""Calls and results of a history, told by the ids of calls.

Clients hand a reply back with other seams: calls of two replies in one message, one reply's calls
in two, results as their tools end, a sentence where we said nothing. A template that prints no ids
would show results under the wrong calls, and the conversation would be none that we know.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.session.chat_template import Message

UNKNOWN_CALL = "tool_call_id (of no call)"
MISSING_ID = "tool_call_id (missing)"
UNANSWERED_CALL = "tool_calls (without a result)"
"""What is counted of a history that cannot be put in order."""
_TEXT_FIELDS = ("content", "reasoning_content")


@dataclass(slots=True, eq=False)
class _ToolTurn:
    """Calls of one reply, and what came back."""

    message: Message
    calls: list[dict[str, Any]]
    reply: Message | None = None
    """The reply of ours that made them."""
    results: dict[int, Message] = field(default_factory=dict)
    """By the index of a call."""
    others: list[Message] = field(default_factory=list)
    """Results of none of them."""

    def find_unanswered(self, call_id: str | None) -> int | None:
        for i, call in enumerate(self.calls):
            if call_id is not None and call.get("id") == call_id and i not in self.results:
                return i
        return None

    def list_messages(self) -> Iterator[Message]:
        """The turn in the order of its calls; as we said it, if the client kept what we said."""
        order = list(range(len(self.calls)))
        message = {**self.message, "tool_calls": self.calls}
        if self.reply is not None:
            places = {call.get("id"): i for i, call in enumerate(self.reply["tool_calls"])}
            order.sort(key=lambda i: places[self.calls[i]["id"]])
            message["tool_calls"] = [self.calls[i] for i in order]
            if len(places) == len(order) and _has_kept_texts(message, self.reply):
                said = {field: self.reply.get(field) for field in _TEXT_FIELDS if field in message}
                message |= said
        yield message
        yield from (self.results[i] for i in order if i in self.results)
        yield from self.others


def _has_kept_texts(message: Message, reply: Message) -> bool:
    """True if what we said is in a message, where that has a text at all."""
    return all(
        (reply.get(one) or "").strip() in message.get(one, "")
        for one in _TEXT_FIELDS
        if one in message
    )


def align_tool_turns(
    messages: Sequence[Message], reply_by_call_id: Mapping[str, Message]
) -> list[Message]:
    """The messages with each reply's calls in one message, then their results in that order.

    `reply_by_call_id` has the replies that are known. A message of the assistant that made no known
    call stays as it is, but for the order of its results.
    """
    aligned: list[Message] = []
    turns: list[_ToolTurn] = []
    for message in messages:
        if message.get("tool_calls"):
            _add_calls(turns, message, reply_by_call_id)
        elif message["role"] == "tool" and turns:
            _add_result(turns, message)
        else:
            aligned += [one for turn in turns for one in turn.list_messages()]
            turns = []
            aligned.append(message)
    return aligned + [one for turn in turns for one in turn.list_messages()]


def _find_reply(call: Mapping[str, Any], reply_by_call_id: Mapping[str, Message]) -> Message | None:
    return reply_by_call_id.get(call.get("id") or "")


def _add_calls(
    turns: list[_ToolTurn], message: Message, reply_by_call_id: Mapping[str, Message]
) -> None:
    replies = [_find_reply(call, reply_by_call_id) for call in message["tool_calls"]]
    if None in replies:
        turns.append(_ToolTurn(message, [*message["tool_calls"]]))
        return
    for call, reply in zip(message["tool_calls"], replies, strict=True):
        turn = next((one for one in turns if one.reply is reply), None)
        if turn is None:
            turn = _ToolTurn(message, [], reply)
            turns.append(turn)
        if call not in turn.calls:  # a client may repeat one
            turn.calls.append(call)


def _add_result(turns: Sequence[_ToolTurn], message: Message) -> None:
    for turn in reversed(turns):
        index = turn.find_unanswered(message.get("tool_call_id"))
        if index is not None:
            turn.results[index] = message
            return
    turns[-1].others.append(message)


def list_unpaired(messages: Sequence[Message]) -> list[str]:
    """What of a history has no partner: results without a call, calls without a result."""
    unanswered = list[str]()
    found = set[str]()
    for message in messages:
        unanswered += [call["id"] for call in message.get("tool_calls") or () if call.get("id")]
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if call_id in unanswered:
                unanswered.remove(call_id)
            else:
                found.add(UNKNOWN_CALL if call_id else MISSING_ID)
    return sorted(found | ({UNANSWERED_CALL} if unanswered else set()))
