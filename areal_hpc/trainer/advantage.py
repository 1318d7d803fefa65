"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2). Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def group_advantages(
    rewards: Sequence[float], groups: Sequence[int], min_reward_std: float
) -> npt.NDArray[np.float32]:
    """How much better each row did than its group, in standard deviations of the group.

    Args:
        rewards: One per row [B].
        groups: The ticket each row belongs to [B].
        min_reward_std: Groups that vary less get zero advantage, as do groups of one row.

    Returns:
        Advantages [B]; the standard deviation is the unbiased one.
    """
    rewards_B = np.asarray(rewards, dtype=np.float64)
    groups_B = np.asarray(groups)
    advantages_B = np.zeros(len(rewards_B), dtype=np.float32)
    for group in np.unique(groups_B):
        members = groups_B == group
        own = rewards_B[members]
        spread = own.std(ddof=1) if len(own) > 1 else 0.0
        if spread >= min_reward_std:
            advantages_B[members] = (own - own.mean()) / spread
    return advantages_B
