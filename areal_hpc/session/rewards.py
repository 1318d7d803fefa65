"""Rewards of interactions.

An agent rewards one interaction by its id, or the last one completed. Failed requests never
become interactions, so they never count as the last.
"""

import math
import numbers

import numpy as np

from areal_hpc.errors import InvalidRewardError, UnknownInteractionError
from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.wire.reward import MAX_REWARD


def find_interaction_to_reward(tree: InteractionTree, interaction_id: str | None) -> Interaction:
    """The interaction a reward is for, or InvalidRewardError: the named one, else the last."""
    if interaction_id is None:
        try:
            return tree.last_completed
        except LookupError:
            raise InvalidRewardError("the session has no completed interaction to reward") from None
    if interaction_id not in tree:
        known = ", ".join(one.interaction_id for one in tree) or "none"
        raise UnknownInteractionError(
            f"no interaction {interaction_id!r} in this session; it has: {known}"
        )
    return tree[interaction_id]


def validate_reward(reward: object) -> float:
    """The reward, a number or numpy's scalar of one, as a finite float; else InvalidRewardError."""
    if isinstance(reward, np.ndarray | np.generic) and reward.size == 1:
        reward = reward.item()
    if not isinstance(reward, numbers.Real):
        raise InvalidRewardError(
            f"expected a finite float as reward, got {reward!r:.200} ({type(reward).__name__})"
        )
    try:
        number = float(reward)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:
        raise InvalidRewardError(f"a reward must be a finite 32-bit float, got {reward!r:.200}")
    return number


def get_final_reward(tree: InteractionTree) -> float | None:
    """The reward of the last interaction that has one."""
    given = [one.reward for one in tree if one.reward is not None]
    return given[-1] if given else None
