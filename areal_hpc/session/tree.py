"""Tree of a session's model calls, in which the children of a call continue its token sequence.

A request whose messages extend an earlier interaction (its messages and its reply) re-uses that
interaction's token ids verbatim, and only the new text is tokenized. So the model reads exactly the
tokens that it sampled, even if tokenizing their text again would split it differently.
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
"""Finish reason of an interaction whose client left before the end of the reply."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens `start` to `end` (exclusive) that packed version `version` sampled."""

    version: int
    start: int
    end: int


class Interaction(CallFacts, kw_only=True):
    """One model call: the new part of its prompt, and the reply.

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
    """Whether the model ended its turn itself: its last token is a stop token."""
    temperature: float
    sampling: bytes = b""
    """JSON of the sampling parameters sent to the engine."""
    ignored: list[str] = msgspec.field(default_factory=list)
    """Names of what the request set without effect: hints, unknown parameters, hosted tools."""
    kept_counts: bytes = b""
    """Number of tokens (uint16) that could be sampled at each position of the reply, if recorded.
    Then `logprobs` are of the distribution over these."""
    kept_ids: bytes = b""
    """Ids of these tokens, position after position."""
    routes: RecordedRoutes | None = None
    """Experts that its tokens visited, and its parent's last token, which no pass had read."""
    reward: float | None = None
    given_reward: Reward | None = None
    """Reward as the agent returned it, with its parts, metrics and note."""
    is_reward_named: bool = False
    """Whether the agent rewarded this reply by its id; else the reward is the episode's."""

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
    """Own ids of the interaction (new prompt, reply); None before the first use."""
    own_texts: Sequence[str] | None = None
    """Texts that the own ids may have; None before the first use."""


class InteractionTree:
    """All recorded interactions of a session; iterating yields them in order of completion."""

    def __init__(self) -> None:
        self._roots: dict[tuple[str, bytes], _MessageNode] = {}
        """Roots of messages by separate agent and context: two such agents never join."""
        self._entries: dict[str, _TreeEntry] = {}
        self.reply_by_call_id: dict[str, Message] = {}
        self._latest_sequence = "", b""
        """Id of the interaction that was recorded last, and its sequence as JSON ids."""
        self.auxiliary: dict[str, str] = {}
        """Reasons that conversations are auxiliary, by the id of their first reply."""

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
        """Interaction that was completed last; LookupError if there is none."""
        for entry in reversed(self._entries.values()):
            if entry.interaction.completed:
                return entry.interaction
        raise LookupError("no interaction has been completed")

    def find_longest_match(
        self, context: bytes, messages: list[Message], separate_agent_id: str = ""
    ) -> tuple[Interaction | None, list[int], str | None]:
        """Find an agent's interaction with the longest history that `messages` begin with, or None.

        Also return the indices of recorded replies in `messages`, and the field in which the rest
        differs from the recorded messages, if a reply is in it: a different question is a branch,
        a different reply a rewritten history. Messages that equal recorded ones are replaced by
        them in the list, so that the next search in it compares identities.
        """
        longest: Interaction | None = None
        replies: list[int] = []
        node = self._roots.get((separate_agent_id, sort_json_keys(context)))
        if node is None:
            # Conversations with other tools or template variables.
            others = [
                root for (agent, _), root in self._roots.items() if agent == separate_agent_id
            ]
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
                has_reply = _has_assistant_message(rest)
                field = node.find_field_differing_from_child(message) if has_reply else None
                return longest, replies, field
            node = child
            if node.interaction is not None:
                longest = node.interaction
                replies.append(depth)
        return longest, replies, None

    def add(self, interaction: Interaction) -> None:
        if interaction.parent_id is None:
            parent = None
            root_key = interaction.separate_agent_id, sort_json_keys(interaction.context)
            node = self._roots.setdefault(root_key, _MessageNode({}))
        else:
            parent = self._entries[interaction.parent_id]
            node = parent.node
        reply = interaction.reply
        for message in interaction.new_messages:
            node = node.find_child(message) or node.add_child(message)
        child = node.find_child(reply)
        if child is None or _list_call_ids(child.message) != _list_call_ids(reply):
            child = node.add_child(reply)  # equal replies differ in the ids of their calls
        node = child
        node.interaction = interaction
        self.reply_by_call_id |= dict.fromkeys(_list_call_ids(reply), reply)
        self._entries[interaction.interaction_id] = _TreeEntry(interaction, node, parent)

    def keep_latest_sequence(self, interaction_id: str, ids_json_inside: bytes) -> None:
        """Keep the sequence of an interaction as the inside of a JSON array: most continue it."""
        self._latest_sequence = interaction_id, ids_json_inside

    def get_own_texts(
        self, interaction: Interaction, decode: Callable[[Interaction], Sequence[str]]
    ) -> Sequence[str]:
        """Return the texts that an interaction's own ids may have, from `decode`, called once."""
        entry = self._entries[interaction.interaction_id]
        if entry.own_texts is None:
            entry.own_texts = decode(interaction)
        return entry.own_texts

    def build_sequence_ids_json_inside(self, interaction: Interaction | None, then: bytes) -> bytes:
        """Return the prompt and reply ids up to `interaction`, and then those of `then`.

        The result and `then` are insides of a JSON array.
        """
        parts = [then]
        entry = self._entries[interaction.interaction_id] if interaction else None
        latest_id, latest_json_inside = self._latest_sequence
        while entry is not None:
            if entry.interaction.interaction_id == latest_id:
                parts.append(latest_json_inside)
                break
            if entry.own_ids_json_inside is None:
                own_ids = unpack_ids(entry.interaction.new_ids + entry.interaction.output_ids)
                entry.own_ids_json_inside = format_ids_as_json_inside(own_ids.tolist())
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
        return [call for call in self if call.interaction_id not in parents]


def _has_assistant_message(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _list_call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or () if call.get("id")]


def unpack_ids(packed_ids: bytes) -> npt.NDArray[np.int32]:
    """Unpack the token ids of an `Interaction` field, [T]."""
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
    """Return JSON with its members sorted; DecodeError if it is not JSON."""
    return context_json and msgspec.json.encode(msgspec.json.decode(context_json), order="sorted")
