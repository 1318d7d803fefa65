"""Credit of replies: the one number that each reply of a batch earned. Pure numpy.

With `credit=episode` it is the sum of all rewards of the episode, which is what the manifest has
for each of its rows. With `credit=turn` it is the reply's own reward plus `turn_discount` times the
mean of what its followers earned; the row's record says who they are. How an episode was packed
into rows makes no difference: a reply has its number, not a row. `overlong` takes something off
what long replies earned (DAPO, arXiv:2503.14476, section 3.4), and `kl.placement=reward` the
divergence of what a reply said from a reference (RLOO's, arXiv:2402.14740, section 2.2; that of
REINFORCE++, arXiv:2501.03262v9, section 3.1, differs from token to token).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.trainer import ObjectiveConfig, OverlongConfig
from areal_hpc.session.credit import compute_branch_weight_by_reply, pass_back_rewards
from areal_hpc.wire.trajectory import CallRecord, TrajectoryRow

SpanWithCreditIndex = tuple[int, int, int]
"""Tokens of a row, from and to (exclusive), and the place of their number in the batch's."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchCredit:
    """What the replies of a batch earned. K: numbers, those of a group one after another."""

    earned_K: npt.NDArray[np.float64]
    """Replies of an episode that share a number have one entry."""
    groups_K: npt.NDArray[np.int64]
    """Ticket of each."""
    episodes_K: npt.NDArray[np.int64]
    """Episode of each within its ticket."""
    branch_weights_K: npt.NDArray[np.float64]
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
    costs_t: npt.NDArray[np.float64]
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
_Earning = tuple[float, float, list[_Span]]
"""What was earned, the weight of its branch, and by which tokens."""


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
    for (ticket, episode), own in _group_rows_by_episode(rows):
        for earned, weight, places in _credit_episode(own, objective, measure):
            for row, begin, end in places:
                spans[row].append((begin, end, len(numbers)))
            numbers.append((earned, ticket, episode, weight))
    return BatchCredit(
        np.array([one[0] for one in numbers], np.float64),
        np.array([one[1] for one in numbers], np.int64),
        np.array([one[2] for one in numbers], np.int64),
        np.array([one[3] for one in numbers], np.float64),
        spans,
    )


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
    for (ticket, _), episode_rows in _group_rows_by_episode(rows):
        is_credited = any(row.record.is_credited for row in episode_rows.values())
        calls, trained, own = _read_calls(episode_rows)
        order = {name: len(found) + number for number, name in enumerate(calls)}
        followers = {} if is_credited else _map_followers(calls)
        if objective.credit == "episode" and not is_credited:
            # The rewards of the manifest, which a shaped reward may differ from.
            total = float(np.mean([row.reward for row in episode_rows.values()]))
            own = {name: None if followers.get(name) else total for name in calls}
        earned = pass_back_rewards(own, followers, 1.0, own_is_total=is_credited)
        weights = dict.fromkeys(calls, 1.0)
        if objective.credit == "turn" and not is_credited:
            weights = compute_branch_weight_by_reply(earned, followers)
        for name, call in calls.items():
            row, begin, end = trained.get(name, (next(iter(episode_rows)), 0, 0))
            places_t = np.arange(max(1, begin), max(1, end))
            places_t = places_t[masks[row][places_t] != 0]
            costs_t = np.zeros(len(places_t))
            if divergences is not None:
                costs_t = objective.kl.coef * divergences[row][places_t].astype(np.float64)
            reward = own[name] or 0.0
            if name in trained:
                reward -= compute_overlong_penalty(call.reply_tokens, objective.overlong)
            found.append(
                ReplyReward(
                    group=ticket,
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


def _group_rows_by_episode(
    rows: Sequence[TrajectoryRow],
) -> list[tuple[tuple[int, int], dict[int, TrajectoryRow]]]:
    """The rows of each ticket and episode, in order, by their places in the batch."""
    rows_of: dict[tuple[int, int], dict[int, TrajectoryRow]] = {}
    for place, row in enumerate(rows):
        rows_of.setdefault((row.ticket_id, row.episode), {})[place] = row
    return sorted(rows_of.items(), key=lambda item: item[0])


def _credit_episode(
    rows: dict[int, TrajectoryRow], objective: ObjectiveConfig, measure: Callable[[_Span], float]
) -> Iterator[_Earning]:
    is_credited = any(row.record.is_credited for row in rows.values())
    if objective.credit == "turn" or is_credited:
        yield from _credit_replies(rows, objective, is_credited, measure)
        return
    reward = next(iter(rows.values())).reward
    if objective.overlong.penalty:
        calls = [call for row in rows.values() for call in row.record.calls if call.trained]
        reward -= math.fsum(
            compute_overlong_penalty(call.reply_tokens, objective.overlong) for call in calls
        )
    spans = [(place, 0, row.num_tokens) for place, row in rows.items()]
    reward -= math.fsum(map(measure, spans))
    yield reward, 1.0, spans


def _credit_replies(
    rows: dict[int, TrajectoryRow],
    objective: ObjectiveConfig,
    is_credited: bool,
    measure: Callable[[_Span], float],
) -> Iterator[_Earning]:
    calls, trained, own = _read_calls(rows)
    penalties = {
        name: compute_overlong_penalty(calls[name].reply_tokens, objective.overlong) + measure(span)
        for name, span in trained.items()
    }
    for name, penalty in penalties.items():
        if penalty and not is_credited:
            own[name] = (own[name] or 0.0) - penalty
    followers = _map_followers(calls)
    discount = 1.0 if is_credited else objective.turn_discount
    earned = pass_back_rewards(own, followers, discount, own_is_total=is_credited)
    weights = compute_branch_weight_by_reply(earned, followers)
    for name, span in trained.items():
        total = earned[name].total
        if total is None:
            continue
        if is_credited:  # what it earned is known already: nothing is passed back any more
            yield total - penalties[name], 1.0, [span]
        else:
            yield total, weights[name], [span]


def _read_calls(
    rows: dict[int, TrajectoryRow],
) -> tuple[dict[str, CallRecord], dict[str, _Span], dict[str, float | None]]:
    """An episode's calls, the tokens of those that are trained, and the rewards they were given."""
    calls: dict[str, CallRecord] = {}
    trained: dict[str, _Span] = {}
    for place, row in rows.items():
        for call in row.record.calls:
            calls.setdefault(call.id, call)
            if call.trained:
                begin = call.prompt_tokens
                trained[call.id] = (place, begin, begin + call.reply_tokens)
    own = {name: None if call.reward is None else call.reward.value for name, call in calls.items()}
    return calls, trained, own


def compute_overlong_penalty(tokens: int, overlong: OverlongConfig) -> float:
    """What the length of a reply takes off: it grows from 0 to `penalty` over `cache_tokens`."""
    if not overlong.penalty or overlong.expected_tokens is None or overlong.cache_tokens is None:
        return 0.0
    beyond = (tokens - overlong.expected_tokens) / overlong.cache_tokens
    return overlong.penalty * min(1.0, max(0.0, beyond))


def _map_followers(calls: dict[str, CallRecord]) -> dict[str, list[str]]:
    return {name: [f for f in call.followers if f in calls] for name, call in calls.items()}
