"""Rewards of interactions.

An agent rewards one interaction by its id, or the last one completed. Failed requests never
become interactions, so they never count as the last.
"""

from __future__ import annotations

from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.trajectory import LARGEST_REWARD


class RewardRefused(ValueError):
    """The reward is not a finite number, or there is no such interaction."""


def rewarded_interaction(tree: InteractionTree, interaction_id: str | None) -> Interaction:
    """The interaction a reward is for: the named one, else the last completed.

    Raises:
        RewardRefused: There is none.
    """
    if interaction_id is None:
        if not len(tree):
            raise RewardRefused("the session has no completed interaction to reward")
        return tree.last
    if interaction_id not in tree:
        known = ", ".join(one.interaction_id for one in tree) or "none"
        raise RewardRefused(f"no interaction {interaction_id!r} in this session; it has: {known}")
    return tree[interaction_id]


def check_reward(reward: float) -> float:
    """The reward, if it is a finite 32-bit float.

    Raises:
        RewardRefused: It is not.
    """
    if not abs(reward) <= LARGEST_REWARD:
        raise RewardRefused(f"a reward must be a finite 32-bit float, got {reward}")
    return float(reward)


def final_reward(tree: InteractionTree) -> float | None:
    """The reward of the last interaction that has one."""
    reward = None
    for interaction in tree:
        if interaction.reward is not None:
            reward = interaction.reward
    return reward
