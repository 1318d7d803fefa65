"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2). Pure numpy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def compute_group_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    episodes: Sequence[int],
    min_reward_std: float,
) -> npt.NDArray[np.float32]:
    """Advantage of each row over its group, in (unbiased) standard deviations of the group [B].

    Every row has a reward, a group (its ticket) and an episode of that group. An episode counts
    once, however many rows its forks gave it. Groups that vary less than `min_reward_std` get zero
    advantage, as do groups of one episode.
    """
    rewards_B = np.asarray(rewards, dtype=np.float64)
    groups_B, episodes_B = np.asarray(groups), np.asarray(episodes)
    advantages_B = np.zeros(len(rewards_B), dtype=np.float32)
    for group in np.unique(groups_B):
        members = groups_B == group
        own = rewards_B[members]
        earned = compute_mean_episode_rewards(own, episodes_B[members])
        spread = earned.std(ddof=1) if len(earned) > 1 else 0.0
        if spread >= min_reward_std:
            advantages_B[members] = (own - earned.mean()) / spread
    return advantages_B


def compute_mean_episode_rewards(
    rewards: npt.ArrayLike, episodes: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """The mean reward of the rows of each distinct episode [number of episodes]."""
    _, places = np.unique(np.asarray(episodes), return_inverse=True)
    sums = np.bincount(places, weights=np.asarray(rewards))
    return (sums / np.bincount(places)).astype(np.float64)
