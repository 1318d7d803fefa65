"""Made-up episodes with branches, as trees of interactions and as the rows of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from areal_hpc.session.export import EpisodeKey, build_training_rows
from areal_hpc.session.tree import (
    Interaction,
    InteractionTree,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import TrajectoryRow


@dataclass(frozen=True)
class MadeUpTurn:
    """A reply: the number of the one that it extends (itself begins a conversation), its reward."""

    parent: int
    reward: float | None
    tokens: int = 2
    is_cut: bool = False
    is_greedy: bool = False
    top_p: float = 1.0
    is_recorded: bool = False
    """Record each token as one that could be sampled."""
    is_named: bool = True
    """The reward names the reply; else it is the episode's."""
    during: tuple[float, float] | None = None
    """Times of question and answer; one turn after the other unless given."""

    @property
    def sampling(self) -> bytes:
        """Sampling parameters of the request; nothing where they are the engine's default."""
        settings = {"temperature": 0.0} if self.is_greedy else {}
        settings |= {"top_p": self.top_p} if self.top_p < 1 else {}
        return msgspec.json.encode(settings) if settings else b""


def build_tree(turns: Sequence[MadeUpTurn]) -> InteractionTree:
    """Build the interactions, one after the other; a reply extends an earlier one, or none."""
    tree = InteractionTree()
    added: list[Interaction] = []
    for number, turn in enumerate(turns):
        parent = added[turn.parent] if 0 <= turn.parent < number else None
        asked_at, answered_at = turn.during or (2.0 * number, 2.0 * number + 1)
        ids = [number * 10 + position for position in range(turn.tokens)]
        interaction = Interaction(
            interaction_id=f"reply-{number}",
            parent_id=parent.interaction_id if parent else None,
            reuse="none" if parent is None else "reused",
            context=b"",
            new_messages=[{"role": "user", "content": f"question {number}"}],
            reply={"role": "assistant", "content": f"reply {number}"},
            prompt_tokens=(parent.num_sequence_tokens if parent else 0) + 1,
            new_ids=pack_ids([200 + number]),
            output_ids=pack_ids(ids),
            logprobs=pack_logprobs([-1.0] * turn.tokens),
            spans=[VersionSpan(1 << 32, 0, turn.tokens)],
            finish_reason="length" if turn.is_cut else "stop",
            closed=not turn.is_cut,
            temperature=0.0 if turn.is_greedy else 1.0,
            sampling=turn.sampling,
            kept_counts=np.ones(len(ids), "<u2").tobytes() if turn.is_recorded else b"",
            kept_ids=pack_ids(ids) if turn.is_recorded else b"",
            asked_at=asked_at,
            answered_at=answered_at,
            reward=turn.reward,
            is_reward_named=turn.is_named,
        )
        tree.add(interaction)
        added.append(interaction)
    return tree


def build_batch(
    groups: Sequence[Sequence[Sequence[MadeUpTurn]]], rule: ExportSettings
) -> list[TrajectoryRow]:
    """The rows of groups of episodes, as a proxy would export them."""
    return [
        row
        for ticket, group in enumerate(groups)
        for episode, turns in enumerate(group)
        for row in build_training_rows(
            build_tree(turns), EpisodeKey(ticket, 0, episode), settings=rule
        )
    ]
