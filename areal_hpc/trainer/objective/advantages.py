"""Advantages: what each reply of a batch earned, less a baseline, in units of their spread.

With `credit=episode` a reply earned the sum of all rewards of its episode, which is what the
manifest has for each row. With `credit=turn` it is the reply's own reward plus `turn_discount`
times the mean of what its followers earned; the row's record says who they are. How an episode was
packed into rows makes no difference: a reply has its number, not a row. `overlong` takes something
off what long replies earned (DAPO, arXiv:2503.14476, section 3.4), and `kl.placement=reward` the
divergence of what a reply said from a reference (RLOO's, arXiv:2402.14740, section 2.2; that of
REINFORCE++, arXiv:2501.03262v9, section 3.1, differs from token to token).

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.trainer import ObjectiveConfig, OverlongConfig
from areal_hpc.session.credit import compute_branch_weight_by_reply, pass_back_rewards
from areal_hpc.wire.trajectory import CallRecord, TrajectoryRow

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
SpanWithCreditIndex = tuple[int, int, int]
"""Tokens of a row, from and to (exclusive), and the place of their number in the batch's."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchCredit:
    """What the replies of a batch earned. K: numbers, those of a group one after another."""

    earned_K: FloatArray
    """Replies of an episode that share a number have one entry."""
    groups_K: npt.NDArray[np.int64]
    """Ticket of each."""
    episodes_K: npt.NDArray[np.int64]
    """Episode of each within its ticket."""
    branch_weights_K: FloatArray
    """Share of the episode's return that it stands for: below 1 where an episode branched."""
    spans: list[list[SpanWithCreditIndex]]
    """Of each row, where its numbers apply. Elsewhere nothing was earned."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplyReward:
    """A reply as steps of its episode: where its trained tokens are, and what each of them gets."""

    group: int
    row: int
    token_places_t: npt.NDArray[np.int64]
    """Their places in the row."""
    reward: float
    """Given after the last of them."""
    costs_t: FloatArray
    """Taken off at each, for its divergence from the reference."""
    followers: list[int]
    """Their places among the replies of the batch."""
    branch_weight: float
    is_reached_by_reward: bool
    """A reward reaches it, its own or that of one that comes later."""


FloatRows = Sequence[npt.NDArray[np.float32]]
MaskRows = Sequence[npt.NDArray[np.uint8]]
_Span = tuple[int, int, int]
"""A row, and its tokens from and to (exclusive)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Episode:
    ticket: int
    number: int
    rows: dict[int, TrajectoryRow]
    """By their places in the batch."""
    is_credited: bool
    """The rewards say already what each reply earned."""
    calls: dict[str, CallRecord]
    trained: dict[str, _Span]
    """The tokens of the calls that are trained."""
    own: dict[str, float | None]
    """The reward that each call was given."""
    followers: dict[str, list[str]]


def _list_episodes(rows: Sequence[TrajectoryRow]) -> Iterator[_Episode]:
    """The episodes of a batch, in order of tickets."""
    rows_of: dict[tuple[int, int], dict[int, TrajectoryRow]] = {}
    for place, row in enumerate(rows):
        rows_of.setdefault((row.ticket_id, row.episode), {})[place] = row
    for (ticket, number), found in sorted(rows_of.items(), key=lambda item: item[0]):
        calls: dict[str, CallRecord] = {}
        trained: dict[str, _Span] = {}
        for place, row in found.items():
            for call in row.record.calls:
                calls.setdefault(call.id, call)
                if call.trained:
                    begin = call.prompt_tokens
                    trained[call.id] = (place, begin, begin + call.reply_tokens)
        yield _Episode(
            ticket,
            number,
            found,
            any(row.record.is_credited for row in found.values()),
            calls,
            trained,
            {
                name: None if call.reward is None else call.reward.value
                for name, call in calls.items()
            },
            {name: [one for one in call.followers if one in calls] for name, call in calls.items()},
        )


def compute_reply_earnings(
    rows: Sequence[TrajectoryRow],
    objective: ObjectiveConfig,
    divergences: FloatRows | None = None,
) -> BatchCredit:
    """The numbers of a batch, in order of groups, episodes, and replies.

    `divergences` has for each token of each row its log pi - log reference, 0 where it is not
    trained; `kl.coef` of them is taken off.
    """

    def measure(span: _Span) -> float:
        if divergences is None:
            return 0.0
        row, begin, end = span
        return objective.kl.coef * float(divergences[row][begin:end].sum(dtype=np.float64))

    numbers: list[tuple[float, int, int, float]] = []
    spans: list[list[SpanWithCreditIndex]] = [[] for _ in rows]
    for episode in _list_episodes(rows):
        for earned, weight, places in _credit_episode(episode, objective, measure):
            for row, begin, end in places:
                spans[row].append((begin, end, len(numbers)))
            numbers.append((earned, episode.ticket, episode.number, weight))
    return BatchCredit(
        np.array([one[0] for one in numbers], np.float64),
        np.array([one[1] for one in numbers], np.int64),
        np.array([one[2] for one in numbers], np.int64),
        np.array([one[3] for one in numbers], np.float64),
        spans,
    )


def _credit_episode(
    episode: _Episode, objective: ObjectiveConfig, measure: Callable[[_Span], float]
) -> Iterator[tuple[float, float, list[_Span]]]:
    """What was earned, the weight of its branch, and by which tokens."""
    penalties = {
        name: compute_overlong_penalty(episode.calls[name].reply_tokens, objective.overlong)
        for name in episode.trained
    }
    if objective.credit == "episode" and not episode.is_credited:
        spans = [(place, 0, row.num_tokens) for place, row in episode.rows.items()]
        reward = next(iter(episode.rows.values())).reward
        yield reward - math.fsum(penalties.values()) - math.fsum(map(measure, spans)), 1.0, spans
        return
    own, discount = episode.own, 1.0
    penalties = {name: one + measure(episode.trained[name]) for name, one in penalties.items()}
    if not episode.is_credited:
        discount = objective.turn_discount
        lost = {name: one for name, one in penalties.items() if one}
        own = own | {name: (own[name] or 0.0) - one for name, one in lost.items()}
    earned = pass_back_rewards(own, episode.followers, discount, own_is_total=episode.is_credited)
    weights = compute_branch_weight_by_reply(earned, episode.followers)
    for name, span in episode.trained.items():
        total = earned[name].total
        if total is None:
            continue
        if episode.is_credited:  # what it earned is known already: nothing is passed back any more
            yield total - penalties[name], 1.0, [span]
        else:
            yield total, weights[name], [span]


def list_reply_rewards(
    rows: Sequence[TrajectoryRow],
    masks: MaskRows,
    objective: ObjectiveConfig,
    divergences: FloatRows | None = None,
) -> list[ReplyReward]:
    """The replies of a batch with what each gets by itself: for a critic, who passes it back.

    `masks` says of each row which tokens are trained. With `credit=episode` an episode gets all of
    its rewards at the end of each of its branches.
    """
    found: list[ReplyReward] = []
    for episode in _list_episodes(rows):
        calls, own = episode.calls, episode.own
        order = {name: len(found) + number for number, name in enumerate(calls)}
        followers = {} if episode.is_credited else episode.followers
        if objective.credit == "episode" and not episode.is_credited:
            # The rewards of the manifest, which a shaped reward may differ from.
            total = float(np.mean([row.reward for row in episode.rows.values()]))
            own = {name: None if followers.get(name) else total for name in calls}
        earned = pass_back_rewards(own, followers, 1.0, own_is_total=episode.is_credited)
        weights = dict.fromkeys(calls, 1.0)
        if objective.credit == "turn" and not episode.is_credited:
            weights = compute_branch_weight_by_reply(earned, followers)
        for name, call in calls.items():
            row, begin, end = episode.trained.get(name, (next(iter(episode.rows)), 0, 0))
            places_t = np.arange(max(1, begin), max(1, end))
            places_t = places_t[masks[row][places_t] != 0]
            costs_t = np.zeros(len(places_t))
            if divergences is not None:
                costs_t = objective.kl.coef * divergences[row][places_t].astype(np.float64)
            reward = own[name] or 0.0
            if name in episode.trained:
                reward -= compute_overlong_penalty(call.reply_tokens, objective.overlong)
            found.append(
                ReplyReward(
                    group=episode.ticket,
                    row=row,
                    token_places_t=places_t,
                    reward=reward,
                    costs_t=costs_t,
                    followers=[order[one] for one in followers.get(name, ())],
                    branch_weight=weights.get(name, 1.0),
                    is_reached_by_reward=earned[name].total is not None,
                )
            )
    return found


def compute_overlong_penalty(tokens: int, overlong: OverlongConfig) -> float:
    """What the length of a reply takes off: it grows from 0 to `penalty` over `cache_tokens`."""
    if not overlong.penalty or overlong.expected_tokens is None or overlong.cache_tokens is None:
        return 0.0
    beyond = (tokens - overlong.expected_tokens) / overlong.cache_tokens
    return overlong.penalty * min(1.0, max(0.0, beyond))


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
