"""Advantages: what replies earned, less a baseline, in units of their spread. Pure numpy.

| `baseline` | subtracted from a number x of a group | source |
|---|---|---|
| `group_mean` | the mean of its group's | GRPO, arXiv:2402.03300, section 4.1.2 |
| `leave_one_out` | the mean of the group's other episodes | RLOO, arXiv:2402.14740, section 2.3 |
| `batch_mean` | the mean of the batch's | REINFORCE++, arXiv:2501.03262v9, section 3.1 |
| `none` | nothing | REINFORCE |

With `value` each token has an advantage of its own (`estimate_advantages`).

`scale_rewards` divides the differences by their own standard deviation, over the group or the
batch. Where they need not add up to zero, that is the root of their mean square. So no advantage
exceeds (m-1)/sqrt(m) for m of them that add up to zero with `std_ddof=1`, nor sqrt(m) otherwise.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.reply_credit import BatchCredit, ReplyReward

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


@dataclass(frozen=True, slots=True, eq=False)
class ReplyEstimate:
    """What was estimated at the trained tokens of a reply [t]."""

    advantages_t: FloatArray
    returns_t: FloatArray
    """What the critic is to say there."""


def estimate_advantages(
    replies: Sequence[ReplyReward], values: Sequence[FloatArray], objective: ObjectiveConfig
) -> list[ReplyEstimate]:
    """Advantages and returns of replies, from the critic's values at their trained tokens.

    Generalized advantage estimation by arXiv:1506.02438, equation 16, with the value V_t of the
    state before token t and its reward r_t, backwards over an episode:

        delta_t = r_t + discount V_t+1 - V_t      A_t = delta_t + discount gae_lambda A_t+1

    A_t + V_t is what the critic learns. Tokens that are not trained (prompts, results of tools) are
    no steps: after the last token of a reply comes the first one of its follower, or the mean over
    followers where the episode branches, or the end. With `gae_unit=turn` a reply is one step: its
    V is that before its first token, its reward the sum of its tokens', and all of them get its A.

    A reply without reward gets advantage 0 and its own value as target, so it has no gradient.
    """
    starts: dict[int, tuple[float, float]] = {}  # value and advantage at a reply's first token
    found = [ReplyEstimate(np.zeros(len(one)), one.copy()) for one in values]
    following = {
        place: [one for one in reply.followers if replies[one].is_reached_by_reward]
        for place, reply in enumerate(replies)
        if reply.is_reached_by_reward
    }
    for place in TopologicalSorter(following).static_order():
        reply, values_t = replies[place], values[place]
        after = [starts[one] for one in following[place]]
        next_value = sum(value for value, _ in after) / max(1, len(after))
        next_advantage = sum(advantage for _, advantage in after) / max(1, len(after))
        if not len(values_t):  # the reward is passed on to those before
            starts[place] = reply.reward + next_value, next_advantage
            continue
        if objective.gae_unit == "turn":
            reward, first = reply.reward - float(reply.costs_t.sum()), float(values_t[0])
            advantages_t = _sum_errors([reward], [first], next_value, next_advantage, objective)
            advantages_t = np.full(len(values_t), advantages_t[0])
            found[place] = ReplyEstimate(advantages_t, advantages_t + first)
        else:
            rewards_t = -reply.costs_t
            rewards_t[-1] += reply.reward
            advantages_t = _sum_errors(rewards_t, values_t, next_value, next_advantage, objective)
            found[place] = ReplyEstimate(advantages_t, advantages_t + values_t)
        starts[place] = float(values_t[0]), float(advantages_t[0])
    return found


def _sum_errors(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    next_value: float,
    next_advantage: float,
    objective: ObjectiveConfig,
) -> FloatArray:
    """Advantages of steps, backwards from the value and the advantage of what follows them."""
    rewards_t, values_t = np.asarray(rewards), np.asarray(values)
    deltas_t = rewards_t + objective.discount * np.append(values_t[1:], next_value) - values_t
    factor, advantage = objective.discount * objective.gae_lambda, next_advantage
    backwards = []
    for delta in deltas_t[::-1].tolist():
        advantage = delta + factor * advantage
        backwards.append(advantage)
    return np.array(backwards[::-1])


def scale_token_advantages(
    replies: Sequence[ReplyReward],
    estimates: Sequence[ReplyEstimate],
    objective: ObjectiveConfig,
) -> list[FloatArray]:
    """Advantages at the tokens of each reply, scaled, times the weight of its branch [t].

    `scale_rewards` divides by the root of their mean square over the tokens of the group or the
    batch; those whose root is below `min_reward_std` are zero.
    """
    by_batch = objective.scale_rewards == "batch"
    groups = [0 if by_batch else reply.group for reply in replies]
    scaled = [one.advantages_t.copy() for one in estimates]
    members_of: dict[int, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        members_of[group].append(place)
    for members in members_of.values():
        together = np.concatenate([scaled[place] for place in members])
        spread = float(np.sqrt(np.square(together).mean())) if len(together) else 0.0
        for place in members:
            if spread < objective.min_reward_std:
                scaled[place][:] = 0.0
            elif objective.scale_rewards != "none":
                scaled[place] /= spread
    return [one * reply.branch_weight for one, reply in zip(scaled, replies, strict=True)]
