"""Generalized advantage estimation over the replies of episodes. Pure numpy.

By arXiv:1506.02438, equation 16, with the value V_t of the state before token t and its reward r_t,
backwards over an episode:

    delta_t = r_t + discount V_t+1 - V_t        A_t = delta_t + discount gae_lambda A_t+1

A_t + V_t is what the critic learns. Tokens that are not trained (prompts, results of tools) are no
steps: after the last token of a reply comes the first one of its follower, or the mean over
followers where the episode branches, or the end. With `gae_unit=turn` a reply is one step: its V
is that before its first token, its reward the sum of its tokens', and all of them get its A.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.reply_credit import ReplyReward

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ReplyEstimate:
    """What was estimated at the trained tokens of a reply [t]."""

    advantages_t: FloatArray
    returns_t: FloatArray
    """What the critic is to say there."""


@dataclass(frozen=True, slots=True)
class _ReplyStart:
    value: float
    advantage: float


def estimate_advantages(
    replies: Sequence[ReplyReward], values: Sequence[FloatArray], objective: ObjectiveConfig
) -> list[ReplyEstimate]:
    """Advantages and returns of replies, from the critic's values at their trained tokens.

    A reply that no reward reaches has the advantage 0, and teaches the critic what it says anyway.
    """
    starts: dict[int, _ReplyStart] = {}
    found = [ReplyEstimate(np.zeros(len(one)), one.copy()) for one in values]
    following = {
        place: [one for one in reply.followers if replies[one].is_reached_by_reward]
        for place, reply in enumerate(replies)
        if reply.is_reached_by_reward
    }
    for place in TopologicalSorter(following).static_order():
        reply, values_t = replies[place], values[place]
        after = _average_starts([starts[one] for one in following[place]])
        if not len(values_t):  # the reward is passed on to those before
            starts[place] = _ReplyStart(reply.reward + after.value, after.advantage)
            continue
        if objective.gae_unit == "turn":
            estimate = _estimate_turn(reply, values_t, after, objective)
        else:
            estimate = _estimate_tokens(reply, values_t, after, objective)
        starts[place] = _ReplyStart(float(values_t[0]), float(estimate.advantages_t[0]))
        found[place] = estimate
    return found


def _average_starts(starts: Sequence[_ReplyStart]) -> _ReplyStart:
    if not starts:
        return _ReplyStart(0.0, 0.0)
    return _ReplyStart(
        sum(one.value for one in starts) / len(starts),
        sum(one.advantage for one in starts) / len(starts),
    )


def _estimate_turn(
    reply: ReplyReward, values_t: FloatArray, after: _ReplyStart, objective: ObjectiveConfig
) -> ReplyEstimate:
    first = float(values_t[0])
    reward = reply.reward - float(reply.costs_t.sum())
    delta = reward + objective.discount * after.value - first
    advantage = delta + objective.discount * objective.gae_lambda * after.advantage
    return ReplyEstimate(
        np.full(len(values_t), advantage), np.full(len(values_t), advantage + first)
    )


def _estimate_tokens(
    reply: ReplyReward, values_t: FloatArray, after: _ReplyStart, objective: ObjectiveConfig
) -> ReplyEstimate:
    rewards_t = -reply.costs_t
    rewards_t[-1] += reply.reward
    nexts_t = np.append(values_t[1:], after.value)
    deltas_t = rewards_t + objective.discount * nexts_t - values_t
    factor, advantage = objective.discount * objective.gae_lambda, after.advantage
    backwards = []
    for delta in deltas_t[::-1].tolist():
        advantage = delta + factor * advantage
        backwards.append(advantage)
    advantages_t = np.array(backwards[::-1])
    return ReplyEstimate(advantages_t, advantages_t + values_t)


def scale_and_weigh_advantages(
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
