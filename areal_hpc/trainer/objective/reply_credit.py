"""Credit of replies: the one number that each reply of a batch earned. Pure numpy.

With `credit=episode` it is the sum of all rewards of the episode, which is what the manifest has
for each of its rows. With `credit=turn` it is the reply's own reward plus `turn_discount` times the
mean of what its followers earned; the row's record says who they are. How an episode was packed
into rows makes no difference: a reply has its number, not a row. `overlong` takes something off
what long replies earned (DAPO, arXiv:2503.14476, equation 13), and `kl.placement=reward` the
divergence of what a reply said from a reference (as in arXiv:2501.03262, section 3, but summed over
the reply: one number for all its tokens).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.trainer import ObjectiveConfig, OverlongConfig
from areal_hpc.session.credit import pass_back_rewards, weigh_branches
from areal_hpc.wire.row_record import CallRecord
from areal_hpc.wire.trajectory import TrajectoryRow

ReplySpan = tuple[int, int, int]
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
    weights_K: npt.NDArray[np.float64]
    """Share of the episode's return that it stands for: below 1 where an episode branched."""
    spans: list[list[ReplySpan]]
    """Of each row, where its numbers apply. Elsewhere nothing was earned."""


@dataclass(frozen=True, slots=True)
class _EarnedNumber:
    """A number, its weight, and where it applies: rows of the batch with tokens from and to."""

    earned: float
    weight: float
    places: list[tuple[int, int, int]]


FloatRows = Sequence[npt.NDArray[np.float32]]
MeasureSpan = Callable[[int, int, int], float]
"""What tokens of a row, from and to, lose for their divergence from the reference."""


def credit_batch(
    rows: Sequence[TrajectoryRow],
    objective: ObjectiveConfig,
    divergences: FloatRows | None = None,
) -> BatchCredit:
    """The numbers of a batch, in order of groups, episodes, and replies.

    `divergences` has for each token of each row its log pi - log reference, 0 where it is not
    trained; `kl.coef` of them is taken off.
    """

    def measure(place: int, begin: int, end: int) -> float:
        if divergences is None:
            return 0.0
        return objective.kl.coef * float(divergences[place][begin:end].sum(dtype=np.float64))

    rows_of: dict[tuple[int, int], list[int]] = {}
    for place, row in enumerate(rows):
        rows_of.setdefault((row.ticket_id, row.episode), []).append(place)
    numbers: list[tuple[int, int, _EarnedNumber]] = []
    for (ticket, episode), places in sorted(rows_of.items()):
        own = {place: rows[place] for place in places}
        numbers += [(ticket, episode, one) for one in _credit_episode(own, objective, measure)]
    spans: list[list[ReplySpan]] = [[] for _ in rows]
    for number, (_, _, one) in enumerate(numbers):
        for place, begin, end in one.places:
            spans[place].append((begin, end, number))
    return BatchCredit(
        np.array([one.earned for _, _, one in numbers], np.float64),
        np.array([ticket for ticket, _, _ in numbers], np.int64),
        np.array([episode for _, episode, _ in numbers], np.int64),
        np.array([one.weight for _, _, one in numbers], np.float64),
        spans,
    )


def _credit_episode(
    rows: dict[int, TrajectoryRow], objective: ObjectiveConfig, measure: MeasureSpan
) -> Iterator[_EarnedNumber]:
    """The numbers of an episode, from its rows by their place in the batch."""
    is_credited = any(row.record.is_credited for row in rows.values())
    if (objective.credit == "turn" or is_credited) and all(r.record.calls for r in rows.values()):
        discount = 1.0 if is_credited else objective.turn_discount
        yield from _credit_replies(rows, discount, is_credited, objective.overlong, measure)
        return
    rewards = [row.reward for row in rows.values()]
    # Rows of before one number a reply may differ. A mean of equal ones would be rounded.
    reward = rewards[0] if len(set(rewards)) == 1 else float(np.mean(rewards))
    if objective.overlong.penalty:
        calls = [call for row in rows.values() for call in row.record.calls if call.trained]
        reward -= math.fsum(
            measure_penalty(call.reply_tokens, objective.overlong) for call in calls
        )
    places = [(place, 0, row.num_tokens) for place, row in rows.items()]
    reward -= math.fsum(measure(*place) for place in places)
    yield _EarnedNumber(reward, 1.0, places)


def _credit_replies(
    rows: dict[int, TrajectoryRow],
    discount: float,
    is_credited: bool,
    overlong: OverlongConfig,
    measure: MeasureSpan,
) -> Iterator[_EarnedNumber]:
    calls: dict[str, CallRecord] = {}
    trained: dict[str, tuple[int, int, int]] = {}
    for place, row in rows.items():
        for call in row.record.calls:
            calls.setdefault(call.id, call)
            if call.trained:
                begin = call.prompt_tokens
                trained[call.id] = (place, begin, begin + call.reply_tokens)
    own = {name: None if call.reward is None else call.reward.value for name, call in calls.items()}
    penalties = {
        name: measure_penalty(calls[name].reply_tokens, overlong) + measure(*span)
        for name, span in trained.items()
    }
    for name, penalty in penalties.items():
        if penalty and not is_credited:
            own[name] = (own[name] or 0.0) - penalty
    followers = _list_followers(calls)
    earned = pass_back_rewards(own, followers, discount, own_is_total=is_credited)
    weights = weigh_branches(earned, followers)
    for name, span in trained.items():
        total = earned[name].total
        if total is None:
            continue
        if is_credited:  # what it earned is known already: nothing is passed back any more
            yield _EarnedNumber(total - penalties[name], 1.0, [span])
        else:
            yield _EarnedNumber(total, weights[name], [span])


def measure_penalty(tokens: int, overlong: OverlongConfig) -> float:
    """What the length of a reply takes off: it grows from 0 to `penalty` over `cache_tokens`."""
    if not overlong.penalty or overlong.expected_tokens is None or overlong.cache_tokens is None:
        return 0.0
    beyond = (tokens - overlong.expected_tokens) / overlong.cache_tokens
    return overlong.penalty * min(1.0, max(0.0, beyond))


def _list_followers(calls: dict[str, CallRecord]) -> dict[str, list[str]]:
    """Who follows each call, of those that are known."""
    if any(call.followers for call in calls.values()):
        return {name: [f for f in call.followers if f in calls] for name, call in calls.items()}
    followers: dict[str, list[str]] = {}  # shards of before followers were noted
    for call in calls.values():
        if call.parent_id in calls:
            followers.setdefault(str(call.parent_id), []).append(call.id)
    return followers
