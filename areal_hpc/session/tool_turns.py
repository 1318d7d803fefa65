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
    """Calls of one reply, and what came back."""

    message: Message
    reply: Message | None = None
    """The reply of ours that made them."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    ids: set[str | None] = field(default_factory=set)
    results: dict[int, Message] = field(default_factory=dict)
    """By the index of a call."""
    others: list[Message] = field(default_factory=list)
    """Results of none of them."""

    def list_messages(self) -> Iterator[Message]:
        """The turn in the order of its calls; as we said it, if the client kept what we said."""
        order = list(range(len(self.calls)))
        message = {**self.message, "tool_calls": self.calls}
        if self.reply is not None:
            places = {call.get("id"): i for i, call in enumerate(self.reply["tool_calls"])}
            order.sort(key=lambda i: places[self.calls[i]["id"]])
            message["tool_calls"] = [self.calls[i] for i in order]
            if len(places) == len(order):
                is_merged = len(self.message["tool_calls"]) > len(order)
                message |= _find_our_texts(message, self.reply, is_merged)
        yield message
        yield from (self.results[i] for i in order if i in self.results)
        yield from self.others


def _find_our_texts(message: Message, reply: Message, is_merged: bool) -> dict[str, Any]:
    """What the reply says in the place of a client's filler, or of several replies' texts."""
    ours = {name: reply.get(name) or "" for name in _TEXT_FIELDS if message.get(name)}
    return {
        name: text
        for name, text in ours.items()
        if message[name] in FILLER_TEXTS or (is_merged and text.strip() in message[name])
    }


class _ToolRun:
    """Turns with tools that follow one another."""

    def __init__(self, reply_by_call_id: Mapping[str, Message]) -> None:
        self._reply_by_call_id = reply_by_call_id
        self._turns: list[_ToolTurn] = []
        self._turn_by_reply: dict[int, _ToolTurn] = {}
        self._unanswered: dict[str | None, list[tuple[_ToolTurn, int]]] = {}
        """Places of calls, by id."""

    def add_calls(self, message: Message) -> None:
        """Add the calls of a message, each to the reply that made it if all are known."""
        replies = [self._reply_by_call_id.get(one.get("id")) for one in message["tool_calls"]]
        foreign = _ToolTurn(message) if None in replies else None
        for call, reply in zip(message["tool_calls"], replies, strict=True):
            turn = foreign or self._turn_by_reply.get(id(reply)) or _ToolTurn(message, reply)
            if not turn.calls:
                self._turns.append(turn)
                self._turn_by_reply[id(turn.reply)] = turn
            if turn.reply is None or call["id"] not in turn.ids:  # a client may repeat one
                place = (turn, len(turn.calls))
                self._unanswered.setdefault(call.get("id"), []).append(place)
                turn.calls.append(call)
                turn.ids.add(call.get("id"))

    def add_result(self, message: Message) -> bool:
        """Add a result to the last call that it may answer; False if there are no calls."""
        call_id = message.get("tool_call_id")
        if call_id is not None and (places := self._unanswered.get(call_id)):
            turn, index = places.pop()
            turn.results[index] = message
        elif self._turns:
            self._turns[-1].others.append(message)
        return bool(self._turns)

    def list_messages(self) -> Iterator[Message]:
        """The turns in the order in which their first calls came."""
        for turn in self._turns:
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
