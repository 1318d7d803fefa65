"""Advantages: earnings of each reply of a batch, minus a baseline, divided by their spread.

With `credit=episode` a reply earns the sum of all rewards of its episode, which is the manifest's
number for each row. With `credit=turn` it earns its own reward plus `turn_discount` times the mean
earnings of its followers, which the row's record lists. How an episode was packed into rows makes
no difference: numbers belong to replies, not to rows. `overlong` subtracts a penalty from long
replies (DAPO, arXiv:2503.14476, section 3.4), `brevity_bonus` multiplies what short successes
earn (prime-rl), and `kl.placement=reward` subtracts the divergence of a reply from a reference
(RLOO, arXiv:2402.14740, section 2.2; in REINFORCE++, arXiv:2501.03262v9, section 3.1, it differs
from token to token).

| `baseline` | subtracted from a number of a group | source |
|---|---|---|
| `group_mean` | mean of the group | GRPO, arXiv:2402.03300, section 4.1.2 |
| `leave_one_out` | mean of the group's other episodes | RLOO, arXiv:2402.14740, section 2.3 |
| `batch_mean` | mean of the batch | REINFORCE++, arXiv:2501.03262v9, section 3.1 |
| `none` | nothing | REINFORCE |

With `value` each token has its own advantage (`estimate_advantages`).

`scale_rewards` divides the differences by their standard deviation over the group or the batch; if
they need not add up to zero, by the root of their mean square. Therefore no advantage exceeds
(m-1)/sqrt(m) for m of them that add up to zero with `std_ddof=1`, nor sqrt(m) otherwise.
`group_mean` divides by the mean of the group (MaxRL, arXiv:2602.02710), which with rewards of 0 and
1 gives at most m-1; a group whose mean is not above zero has no advantages.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.objective import ObjectiveConfig, OverlongConfig
from areal_hpc.session.credit import compute_branch_weight_by_reply, pass_back_rewards
from areal_hpc.wire.trajectory import CallRecord, TrajectoryRow

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
SpanWithCreditIndex = tuple[int, int, int]
"""First token of a row, the one behind the last, and the index of their number in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchCredit:
    """Earnings of the replies of a batch. K: numbers, ordered by group."""

    earned_K: FloatArray
    """Earned numbers; replies of an episode that share a number have one entry."""
    groups_K: npt.NDArray[np.int64]
    """Ticket of each number."""
    episodes_K: npt.NDArray[np.int64]
    """Episode of each number within its ticket."""
    branch_weights_K: FloatArray
    """Share of the episode's return that a number represents: below 1 if the episode branched."""
    spans: list[list[SpanWithCreditIndex]]
    """Per row, tokens to which its numbers apply. Other tokens earn nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplyReward:
    """A reply as steps of its episode: its trained tokens, and the reward of each."""

    group: int
    row: int
    token_positions_t: npt.NDArray[np.int64]
    """Positions of the trained tokens in the row."""
    reward: float
    """Reward after the last token."""
    costs_t: FloatArray
    """Cost at each token of its divergence from the reference, to be subtracted."""
    followers: list[int]
    """Indices of the following replies in the batch."""
    branch_weight: float
    is_reached_by_reward: bool
    """Whether a reward reaches it: its own or that of a later reply."""


FloatRows = Sequence[npt.NDArray[np.float32]]
MaskRows = Sequence[npt.NDArray[np.uint8]]
_Span = tuple[int, int, int]
"""A row, its first token, and the one behind the last."""


@dataclass(frozen=True, slots=True, eq=False)
class _Episode:
    ticket: int
    number: int
    rows: dict[int, TrajectoryRow]
    """Rows by their index in the batch."""
    is_credited: bool
    """Whether the rewards already state what each reply earned."""
    calls: dict[str, CallRecord]
    trained: dict[str, _Span]
    """Tokens of the trained calls."""
    own: dict[str, float | None]
    """Reward given to each call."""
    followers: dict[str, list[str]]


def _list_episodes(rows: Sequence[TrajectoryRow]) -> Iterator[_Episode]:
    """Yield the episodes of a batch, in order of tickets."""
    rows_of: dict[tuple[int, int], dict[int, TrajectoryRow]] = {}
    for index, row in enumerate(rows):
        rows_of.setdefault((row.ticket_id, row.episode), {})[index] = row
    for (ticket, number), episode_rows in sorted(rows_of.items(), key=lambda item: item[0]):
        calls: dict[str, CallRecord] = {}
        trained: dict[str, _Span] = {}
        for index, row in episode_rows.items():
            for call in row.record.calls:
                calls.setdefault(call.id, call)
                if call.trained:
                    begin = call.prompt_tokens
                    trained[call.id] = (index, begin, begin + call.reply_tokens)
        yield _Episode(
            ticket,
            number,
            episode_rows,
            any(row.record.is_credited for row in episode_rows.values()),
            calls,
            trained,
            {
                name: None if call.reward is None else call.reward.value
                for name, call in calls.items()
            },
            {name: [key for key in call.followers if key in calls] for name, call in calls.items()},
        )


def compute_reply_earnings(
    rows: Sequence[TrajectoryRow], objective: ObjectiveConfig, divergences: FloatRows | None = None
) -> BatchCredit:
    """Compute the numbers of a batch, in order of groups, episodes and replies.

    `divergences` has log pi - log reference for each token of each row, 0 if it is not trained;
    `kl.coef` times their sum is subtracted.
    """

    def measure(span: _Span) -> float:
        if divergences is None:
            return 0.0
        row, begin, end = span
        return objective.kl.coef * float(divergences[row][begin:end].sum(dtype=np.float64))

    numbers: list[tuple[float, int, int, float]] = []
    lengths: list[int] = []
    spans: list[list[SpanWithCreditIndex]] = [[] for _ in rows]
    for episode in _list_episodes(rows):
        sampled_tokens = sum(end - begin for _, begin, end in episode.trained.values())
        for earned, weight, earning_spans in _credit_episode(episode, objective, measure):
            lengths.append(sampled_tokens)
            for row, begin, end in earning_spans:
                spans[row].append((begin, end, len(numbers)))
            numbers.append((earned, episode.ticket, episode.number, weight))
    earned_K = np.array([number[0] for number in numbers], np.float64)
    groups_K = np.array([number[1] for number in numbers], np.int64)
    if objective.brevity_bonus:
        _reward_brevity(earned_K, groups_K, np.array(lengths), objective.brevity_bonus)
    return BatchCredit(
        earned_K,
        groups_K,
        np.array([number[2] for number in numbers], np.int64),
        np.array([number[3] for number in numbers], np.float64),
        spans,
    )


def _credit_episode(
    episode: _Episode, objective: ObjectiveConfig, measure: Callable[[_Span], float]
) -> Iterator[tuple[float, float, list[_Span]]]:
    """Yield an earned number, the weight of its branch, and the tokens that earned it."""
    penalties = {
        name: compute_overlong_penalty(episode.calls[name].reply_tokens, objective.overlong)
        for name in episode.trained
    }
    if objective.credit == "episode" and not episode.is_credited:
        spans = [(index, 0, row.num_tokens) for index, row in episode.rows.items()]
        reward = next(iter(episode.rows.values())).reward
        yield reward - math.fsum(penalties.values()) - math.fsum(map(measure, spans)), 1.0, spans
        return
    own, discount = episode.own, 1.0
    penalties = {name: cost + measure(episode.trained[name]) for name, cost in penalties.items()}
    if not episode.is_credited:
        discount = objective.turn_discount
        lost = {name: cost for name, cost in penalties.items() if cost}
        own = own | {name: (own[name] or 0.0) - cost for name, cost in lost.items()}
    earned = pass_back_rewards(own, episode.followers, discount, own_is_total=episode.is_credited)
    weights = compute_branch_weight_by_reply(earned, episode.followers)
    for name, span in episode.trained.items():
        total = earned[name].total
        if total is None:
            continue
        if episode.is_credited:  # its earnings are known already: no reward is passed back
            yield total - penalties[name], 1.0, [span]
        else:
            yield total, weights[name], [span]


def list_reply_rewards(
    rows: Sequence[TrajectoryRow],
    masks: MaskRows,
    objective: ObjectiveConfig,
    divergences: FloatRows | None = None,
) -> list[ReplyReward]:
    """List the replies of a batch with their own rewards, for a critic, which passes them back.

    `masks` marks each row's trained tokens. With `credit=episode` an episode gets all of its
    rewards at the end of each of its branches.
    """
    replies: list[ReplyReward] = []
    for episode in _list_episodes(rows):
        calls, own = episode.calls, episode.own
        order = {name: len(replies) + number for number, name in enumerate(calls)}
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
            positions_t = np.arange(max(1, begin), max(1, end))
            positions_t = positions_t[masks[row][positions_t] != 0]
            costs_t = np.zeros(len(positions_t))
            if divergences is not None:
                costs_t = objective.kl.coef * divergences[row][positions_t].astype(np.float64)
            reward = own[name] or 0.0
            if name in episode.trained:
                reward -= compute_overlong_penalty(call.reply_tokens, objective.overlong)
            replies.append(
                ReplyReward(
                    group=episode.ticket,
                    row=row,
                    token_positions_t=positions_t,
                    reward=reward,
                    costs_t=costs_t,
                    followers=[order[follower] for follower in followers.get(name, ())],
                    branch_weight=weights.get(name, 1.0),
                    is_reached_by_reward=earned[name].total is not None,
                )
            )
    return replies


def compute_overlong_penalty(tokens: int, overlong: OverlongConfig) -> float:
    """Return the penalty of a reply's length: it grows from 0 to `penalty` over `cache_tokens`."""
    if not overlong.penalty or overlong.expected_tokens is None or overlong.cache_tokens is None:
        return 0.0
    beyond = (tokens - overlong.expected_tokens) / overlong.cache_tokens
    return overlong.penalty * min(1.0, max(0.0, beyond))


def _reward_brevity(
    earned_K: FloatArray,
    groups_K: npt.NDArray[np.int64],
    lengths_K: npt.NDArray[np.int64],
    bonus: float,
) -> None:
    for group in np.unique(groups_K):
        successes_K = (groups_K == group) & (earned_K > 0)
        if successes_K.any():
            lengths = lengths_K[successes_K]
            savings = 1 - lengths / max(1.0, lengths.mean())
            earned_K[successes_K] *= 1 + bonus * np.maximum(0, savings)


def compute_advantages(credit: BatchCredit, objective: ObjectiveConfig) -> FloatArray:
    """Compute the advantage of each number of a batch, times its weight [K].

    Differences that vary less than `min_reward_std`, over the group (or over the batch, if its
    spread scales them), become zero.
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
    for set_id in np.unique(sets_K):
        members = sets_K == set_id
        lost_freedom = objective.std_ddof if sums_to_zero(credit, members, objective) else 0
        degrees = int(members.sum()) - lost_freedom
        squares = float((advantages_K[members] * advantages_K[members]).sum())
        spread = math.sqrt(squares / degrees) if degrees else 0.0
        if spread < objective.min_reward_std:
            advantages_K[members] = 0.0
        elif objective.scale_rewards == "group_mean":
            mean = credit.earned_K[members].mean()
            advantages_K[members] *= 1.0 / mean if mean > 0 else 0.0
        elif objective.scale_rewards != "none":
            advantages_K[members] /= spread
    return advantages_K * credit.branch_weights_K


def sums_to_zero(credit: BatchCredit, members_K: BoolArray, objective: ObjectiveConfig) -> bool:
    """Return whether the differences of these numbers, which are scaled together, sum to zero."""
    match objective.baseline:
        case "group_mean":
            return True
        case "leave_one_out":  # with one number per episode: n / (n - 1) times `group_mean`'s
            keys = np.stack([credit.groups_K[members_K], credit.episodes_K[members_K]])
            return len(np.unique(keys, axis=1).T) == len(keys.T)
        case "batch_mean":
            return objective.scale_rewards == "batch"
        case "none" | "value":
            return False


def _compute_means(earned_K: FloatArray, sets_K: npt.NDArray[np.int64]) -> FloatArray:
    means_K = np.empty_like(earned_K)
    for set_id in np.unique(sets_K):
        members = sets_K == set_id
        means_K[members] = earned_K[members].mean()
    return means_K


def _compute_means_of_others(credit: BatchCredit) -> FloatArray:
    means_K = credit.earned_K.copy()
    for group in np.unique(credit.groups_K):
        in_group = credit.groups_K == group
        for episode in np.unique(credit.episodes_K[in_group]):
            others = in_group & (credit.episodes_K != episode)
            if others.any():
                means_K[in_group & ~others] = credit.earned_K[others].mean()
    return means_K


def compute_mean_episode_rewards(rewards: npt.ArrayLike, episodes: npt.ArrayLike) -> FloatArray:
    _, indices = np.unique(np.asarray(episodes), return_inverse=True)
    sums = np.bincount(indices, weights=np.asarray(rewards))
    return (sums / np.bincount(indices)).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class ReplyEstimate:
    """Estimates at the trained tokens of a reply [t]."""

    advantages_t: FloatArray
    returns_t: FloatArray
    """Targets of the critic."""


def estimate_advantages(
    replies: Sequence[ReplyReward], values: Sequence[FloatArray], objective: ObjectiveConfig
) -> list[ReplyEstimate]:
    """Estimate advantages and returns of replies from the critic's values at their trained tokens.

    Generalized advantage estimation by arXiv:1506.02438, equation 16, with the value V_t of the
    state before token t and its reward r_t, backwards over an episode:

        delta_t = r_t + discount V_t+1 - V_t      A_t = delta_t + discount gae_lambda A_t+1

    The critic's target is A_t + V_t. Tokens that are not trained (prompts, results of tools) are no
    steps: after the last token of a reply comes the first token of its follower, or the mean over
    followers if the episode branches, or the end. With `gae_unit=turn` a reply is one step: V is
    the value before its first token, r the sum of its tokens' rewards, and all its tokens get its
    A.

    A reply that no reward reaches gets advantage 0 and its own value as target, and so no gradient.
    """
    starts: dict[int, tuple[float, float]] = {}  # value and advantage at a reply's first token
    estimates = [ReplyEstimate(np.zeros(len(values_t)), values_t.copy()) for values_t in values]
    following = {
        index: [other for other in reply.followers if replies[other].is_reached_by_reward]
        for index, reply in enumerate(replies)
        if reply.is_reached_by_reward
    }
    for index in TopologicalSorter(following).static_order():
        reply, values_t = replies[index], values[index]
        after = [starts[other] for other in following[index]]
        next_value = sum(value for value, _ in after) / max(1, len(after))
        next_advantage = sum(advantage for _, advantage in after) / max(1, len(after))
        if not len(values_t):  # the reward passes to earlier replies
            starts[index] = reply.reward + next_value, next_advantage
            continue
        if objective.gae_unit == "turn":
            reward, first = reply.reward - float(reply.costs_t.sum()), float(values_t[0])
            advantages_t = _sum_errors([reward], [first], next_value, next_advantage, objective)
            advantages_t = np.full(len(values_t), advantages_t[0])
            estimates[index] = ReplyEstimate(advantages_t, advantages_t + first)
        else:
            rewards_t = -reply.costs_t
            rewards_t[-1] += reply.reward
            advantages_t = _sum_errors(rewards_t, values_t, next_value, next_advantage, objective)
            estimates[index] = ReplyEstimate(advantages_t, advantages_t + values_t)
        starts[index] = float(values_t[0]), float(advantages_t[0])
    return estimates


def _sum_errors(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    next_value: float,
    next_advantage: float,
    objective: ObjectiveConfig,
) -> FloatArray:
    """Compute advantages of steps backwards, from the value and the advantage after the last."""
    rewards_t, values_t = np.asarray(rewards), np.asarray(values)
    deltas_t = rewards_t + objective.discount * np.append(values_t[1:], next_value) - values_t
    factor, advantage = objective.discount * objective.gae_lambda, next_advantage
    backwards = []
    for delta in deltas_t[::-1].tolist():
        advantage = delta + factor * advantage
        backwards.append(advantage)
    return np.array(backwards[::-1])


def scale_token_advantages(
    replies: Sequence[ReplyReward], estimates: Sequence[ReplyEstimate], objective: ObjectiveConfig
) -> list[FloatArray]:
    """Scale the advantages at the tokens of each reply, and multiply by its branch's weight [t].

    `scale_rewards` divides by the root mean square over the tokens of the group or the batch;
    advantages whose root is below `min_reward_std` become zero.
    """
    by_batch = objective.scale_rewards == "batch"
    groups = [0 if by_batch else reply.group for reply in replies]
    scaled = [estimate.advantages_t.copy() for estimate in estimates]
    members_of: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members_of[group].append(index)
    for members in members_of.values():
        together = np.concatenate([scaled[index] for index in members])
        spread = float(np.sqrt(np.square(together).mean())) if len(together) else 0.0
        for index in members:
            if spread < objective.min_reward_std:
                scaled[index][:] = 0.0
            elif objective.scale_rewards != "none":
                scaled[index] /= spread
    return [scaled_t * reply.branch_weight for scaled_t, reply in zip(scaled, replies, strict=True)]
