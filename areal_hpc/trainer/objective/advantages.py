"""Advantages: what replies earned, less a baseline, in units of their spread. Pure numpy.

| `baseline` | subtracted from a number x of a group | source |
|---|---|---|
| `group_mean` | the mean of its group's | GRPO, arXiv:2402.03300, section 4.1.2 |
| `leave_one_out` | the mean of the group's other episodes | RLOO, arXiv:2402.14740, section 2.3 |
| `batch_mean` | the mean of the batch's | REINFORCE++, arXiv:2501.03262v9, section 3.1 |
| `none` | nothing | REINFORCE |

With `value` each token has an advantage of its own (`gae.py`).

`scale_rewards` divides the differences by their own standard deviation, over the group or the
batch. Where they need not add up to zero, that is the root of their mean square. So no advantage
exceeds (m-1)/sqrt(m) for m of them that add up to zero with `std_ddof=1`, nor sqrt(m) otherwise.
"""

import math

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.reply_credit import BatchCredit

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def compute_advantages(credit: BatchCredit, objective: ObjectiveConfig) -> FloatArray:
    """The advantage of each number of a batch, times its weight [K].

    Differences that vary less than `min_reward_std`, over the group (or the batch, if they are
    scaled by its spread), are zero.
    """
    by_batch = np.zeros_like(credit.groups_K)
    baselines_K = {
        "group_mean": lambda: _compute_means(credit.earned_K, credit.groups_K),
        "leave_one_out": lambda: _compute_means_of_others(credit),
        "batch_mean": lambda: _compute_means(credit.earned_K, by_batch),
        "none": lambda: np.zeros_like(credit.earned_K),
    }[objective.baseline]()
    advantages_K = credit.earned_K - baselines_K
    sets_K = by_batch if objective.scale_rewards == "batch" else credit.groups_K
    for one in np.unique(sets_K):
        members = sets_K == one
        lost = objective.std_ddof if sums_to_zero(credit, members, objective) else 0
        freedom = int(members.sum()) - lost
        squares = float((advantages_K[members] * advantages_K[members]).sum())
        spread = math.sqrt(squares / freedom) if freedom else 0.0
        if spread < objective.min_reward_std:
            advantages_K[members] = 0.0
        elif objective.scale_rewards != "none":
            advantages_K[members] /= spread
    return advantages_K * credit.branch_weights_K


def sums_to_zero(credit: BatchCredit, members_K: BoolArray, objective: ObjectiveConfig) -> bool:
    """True if the differences of these numbers, which are scaled together, add up to zero."""
    match objective.baseline:
        case "group_mean":
            return True
        case "leave_one_out":  # of one number an episode they are n / (n - 1) of the former
            keys = np.stack([credit.groups_K[members_K], credit.episodes_K[members_K]])
            return len(np.unique(keys, axis=1).T) == len(keys.T)
        case "batch_mean":
            return objective.scale_rewards == "batch"
        case "none" | "value":
            return False


def _compute_means(earned_K: FloatArray, sets_K: npt.NDArray[np.int64]) -> FloatArray:
    means_K = np.empty_like(earned_K)
    for one in np.unique(sets_K):
        members = sets_K == one
        means_K[members] = earned_K[members].mean()
    return means_K


def _compute_means_of_others(credit: BatchCredit) -> FloatArray:
    means_K = credit.earned_K.copy()
    for group in np.unique(credit.groups_K):
        of_group = credit.groups_K == group
        for episode in np.unique(credit.episodes_K[of_group]):
            others = of_group & (credit.episodes_K != episode)
            if others.any():
                means_K[of_group & ~others] = credit.earned_K[others].mean()
    return means_K


def compute_mean_episode_rewards(rewards: npt.ArrayLike, episodes: npt.ArrayLike) -> FloatArray:
    _, places = np.unique(np.asarray(episodes), return_inverse=True)
    sums = np.bincount(places, weights=np.asarray(rewards))
    return (sums / np.bincount(places)).astype(np.float64)
