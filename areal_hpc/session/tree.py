"""The interaction tree of one session: which request continues which, token by token.

A request whose messages extend an earlier interaction (its messages and its reply) re-uses that
interaction's token ids verbatim and tokenizes only what is new. So the model reads exactly what
it said, even where tokenizing its text again would split it differently.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import find_differing_field
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.trajectory import CallFacts, PromptReuse, RecordedRoutes

ABORT_FINISH_REASON = "abort"
"""How an interaction ends that its client left while the model spoke."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens `start` to `end` (exclusive) were sampled from packed version `version`."""

    version: int
    start: int
    end: int


class Interaction(CallFacts, kw_only=True):
    """One model call: what was new in its prompt, and what the model said.

    Token arrays are little-endian bytes (int32 ids, float32 log-probabilities), the form in
    which they are journaled. The whole prompt, of `prompt_tokens`, is the parent's sequence plus
    `new_ids`; `new_messages` are those after the parent's reply.
    """

    interaction_id: str
    parent_id: str | None
    reuse: PromptReuse
    context: bytes
    """JSON of the tools and template variables the messages were rendered with."""
    new_messages: list[Message]
    reply: Message
    prompt_tokens: int
    new_ids: bytes
    output_ids: bytes
    logprobs: bytes
    spans: list[VersionSpan]
    finish_reason: str
    closed: bool
    """The model ended its turn itself: its last token is a stop token."""
    temperature: float
    sampling: bytes = b""
    """JSON of the sampling parameters that the engine was asked for."""
    ignored: list[str] = msgspec.field(default_factory=list)
    """Names of what the request asked for in vain: hints, unknown parameters, hosted tools."""
    kept_counts: bytes = b""
    """Of each sampled token, how many could have been in its place (uint16), if that was recorded.
    Then `logprobs` are of the distribution over these."""
    kept_ids: bytes = b""
    """Those tokens, of one place after those of another."""
    routes: RecordedRoutes | None = None
    """Experts that its tokens visited, and its parent's last one: no pass had read that before."""
    reward: float | None = None
    given_reward: Reward | None = None
    """What the agent gave, with its parts, metrics and note."""
    is_reward_named: bool = False
    """The agent named this reply when it gave the reward; else the reward is the episode's."""

    @property
    def completed(self) -> bool:
        return self.finish_reason != ABORT_FINISH_REASON

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids) // 4

    @property
    def num_sequence_tokens(self) -> int:
        return self.prompt_tokens + self.num_output_tokens


@dataclass(slots=True)
class _MessageNode:
    message: Message
    children: list[_MessageNode] = field(default_factory=list)
    interaction: Interaction | None = None

    def find_child(self, message: Message) -> _MessageNode | None:
        if not self.children:
            return None
        equal = [
            node
            for node in self.children
            if node.message == message or find_differing_field(node.message, message) is None
        ]
        ids = _list_call_ids(message) if equal else []
        return next(
            (node for node in equal if ids and _list_call_ids(node.message) == ids),
            equal[-1] if equal else None,
        )

    def add_child(self, message: Message) -> _MessageNode:
        self.children.append(_MessageNode(message))
        return self.children[-1]

    def find_field_differing_from_child(self, message: Message) -> str | None:
        for node in self.children:
            if node.message["role"] == message["role"]:
                return find_differing_field(node.message, message)
        return "role" if self.children else None


class _TreeEntry(msgspec.Struct):
    interaction: Interaction
    node: _MessageNode
    parent: _TreeEntry | None
    own_ids_json_inside: bytes | None = None
    """The interaction's own ids (new prompt, reply); None before anybody asked for them."""
    own_texts: Sequence[str] | None = None
    """How these may be written; None before anybody asked."""


class InteractionTree:
    """All completed interactions of a session; iterating gives them in order of completion."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _MessageNode] = {}
        self._entries: dict[str, _TreeEntry] = {}
        self.reply_by_call_id: dict[str, Message] = {}
        self._latest_sequence = "", b""
        """Id of the interaction that was recorded last, and its sequence as JSON ids."""
        self.auxiliary: dict[str, str] = {}
        """Why a conversation is not to be learned from, by the id of its first reply."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Interaction]:
        return (entry.interaction for entry in self._entries.values())

    def __contains__(self, interaction_id: str) -> bool:
        return interaction_id in self._entries

    def __getitem__(self, interaction_id: str) -> Interaction:
        return self._entries[interaction_id].interaction

    @property
    def last_completed(self) -> Interaction:
        """The interaction completed last; LookupError if there is none."""
        for entry in reversed(self._entries.values()):
            if entry.interaction.completed:
                return entry.interaction
        raise LookupError("no interaction has been completed")

    def find_longest_match(
        self, context: bytes, messages: list[Message]
    ) -> tuple[Interaction | None, list[int], str | None]:
        """The interaction with the longest history that `messages` begin with, if there is one.

        Also where replies that we know stand in `messages`, its own last, and in what the messages
        after that depart from what we know, if they claim replies: a different question is a
        branch, a different reply is a history that was rewritten. Messages that equal the tree's
        are replaced by them: who sends the same list once more has them found by their identity.
        """
        found: Interaction | None = None
        replies: list[int] = []
        node = self._roots.get(sort_json_keys(context))
        if node is None:
            others = self._roots.values()  # conversations under other tools or template variables
            is_known = _has_assistant_message(messages) and any(
                root.find_child(messages[0]) for root in others
            )
            return None, replies, "tools" if is_known else None
        for depth, message in enumerate(messages):
            child = node.children[0] if len(node.children) == 1 else None
            if child is None or child.message is not message:
                if child is not None and child.message == message:
                    messages[depth] = child.message
                else:
                    child = node.find_child(message)
            if child is None:
                rest = messages[depth:]
                is_claimed = _has_assistant_message(rest)
                field = node.find_field_differing_from_child(message) if is_claimed else None
                return found, replies, field
            node = child
            if node.interaction is not None:
                found = node.interaction
                replies.append(depth)
        return found, replies, None

    def add(self, interaction: Interaction) -> None:
        if interaction.parent_id is None:
            parent = None
            node = self._roots.setdefault(sort_json_keys(interaction.context), _MessageNode({}))
        else:
            parent = self._entries[interaction.parent_id]
            node = parent.node
        reply = interaction.reply
        for message in interaction.new_messages:
            node = node.find_child(message) or node.add_child(message)
        known = node.find_child(reply)
        if known is None or _list_call_ids(known.message) != _list_call_ids(reply):
            known = node.add_child(reply)  # equal replies are told apart by their calls' ids
        node = known
        node.interaction = interaction
        self.reply_by_call_id |= dict.fromkeys(_list_call_ids(reply), reply)
        self._entries[interaction.interaction_id] = _TreeEntry(interaction, node, parent)

    def keep_latest_sequence(self, interaction_id: str, ids_json_inside: bytes) -> None:
        """Keep the sequence that an interaction ends, the inside of a JSON array: most go on."""
        self._latest_sequence = interaction_id, ids_json_inside

    def get_own_texts(
        self, interaction: Interaction, decode: Callable[[Interaction], Sequence[str]]
    ) -> Sequence[str]:
        """How an interaction's own ids may be written, by `decode`, which is asked once."""
        entry = self._entries[interaction.interaction_id]
        if entry.own_texts is None:
            entry.own_texts = decode(interaction)
        return entry.own_texts

    def build_sequence_ids_json_inside(self, interaction: Interaction | None, then: bytes) -> bytes:
        """Prompt and reply ids up to `interaction`, and what follows them.

        Both this and what follows are the inside of a JSON array.
        """
        parts = [then]
        entry = self._entries[interaction.interaction_id] if interaction else None
        latest_id, latest_json_inside = self._latest_sequence
        while entry is not None:
            if entry.interaction.interaction_id == latest_id:
                parts.append(latest_json_inside)
                break
            if entry.own_ids_json_inside is None:
                one = entry.interaction
                entry.own_ids_json_inside = format_ids_as_json_inside(
                    unpack_ids(one.new_ids + one.output_ids).tolist()
                )
            parts.append(entry.own_ids_json_inside)
            entry = entry.parent
        return join_json_array_insides(*reversed(parts))

    def get_path_to(self, interaction: Interaction) -> list[Interaction]:
        path: list[Interaction] = []
        entry: _TreeEntry | None = self._entries[interaction.interaction_id]
        while entry is not None:
            path.append(entry.interaction)
            entry = entry.parent
        path.reverse()
        return path

    def list_leaves(self) -> list[Interaction]:
        parents = {interaction.parent_id for interaction in self}
        return [one for one in self if one.interaction_id not in parents]


def _has_assistant_message(messages: Sequence[Message]) -> bool:
    return any(one["role"] == "assistant" for one in messages)


def _list_call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or () if call.get("id")]


def unpack_ids(packed_ids: bytes) -> npt.NDArray[np.int32]:
    """Token ids of an `Interaction` field, [T]."""
    return np.frombuffer(packed_ids, dtype="<i4")


def pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def pack_counts_as_uint16(counts: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(counts)}H", *counts)


def format_ids_as_json_inside(ids: Sequence[int]) -> bytes:
    return msgspec.json.encode(ids)[1:-1]


def join_json_array_insides(*array_insides: bytes) -> bytes:
    return b",".join(part for part in array_insides if part)


@lru_cache(maxsize=256)
def sort_json_keys(context_json: bytes) -> bytes:
    """The same JSON whatever the order of its members; DecodeError if it is none."""
    return context_json and msgspec.json.encode(msgspec.json.decode(context_json), order="sorted")
