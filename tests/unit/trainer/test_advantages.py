"""Advantages, one number a reply, equal a reference that follows the definitions literally."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.objective import ObjectiveConfig, OverlongConfig
from areal_hpc.trainer.batch.packing import Channel
from areal_hpc.trainer.batch.training_rows import build_rows
from areal_hpc.trainer.objective.advantages import compute_overlong_penalty
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.sample_episodes import MadeUpTurn, build_batch

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 1.0, -3.0, 40.0]))


@st.composite
def made_up_episodes(draw: st.DrawFn) -> list[MadeUpTurn]:
    count = draw(st.integers(1, 4))
    turns = [MadeUpTurn(draw(st.integers(0, 3)), draw(REWARDS)) for _ in range(count)]
    return [*turns[:-1], replace(turns[-1], reward=draw(st.sampled_from([0.0, 1.0, 0.3])))]


BATCHES = st.lists(st.lists(made_up_episodes(), min_size=2, max_size=4), min_size=1, max_size=3)
OBJECTIVES = st.builds(
    lambda credit, discount, baseline, scale, ddof: ObjectiveConfig(
        credit=credit,
        turn_discount=discount if credit == "turn" else 1.0,
        baseline=baseline,
        scale_rewards=scale,
        std_ddof=1 if scale in ("none", "group_mean") else ddof,
    ),
    st.sampled_from(["episode", "turn"]),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from(["group_mean", "leave_one_out", "batch_mean", "none"]),
    st.sampled_from(["group", "group_mean", "batch", "none"]),
    st.sampled_from([0, 1]),
)


def token_advantages(rows: list[TrajectoryRow], objective: ObjectiveConfig) -> dict[Any, float]:
    """Compute the advantage of each trained token by ticket, episode and id, unique there."""
    advantages: dict[Any, float] = {}
    built = build_rows(rows, WeightVersion(1, 0), [GenerationFork(1, 0)], objective)
    for row, training_row in zip(rows, built, strict=True):
        for index in np.flatnonzero(row.loss_mask_T):
            key = (row.ticket_id, row.episode, int(row.input_ids_T[index]))
            assert key not in advantages
            advantages[key] = float(training_row.channels[Channel.ADVANTAGE][index])
    return advantages


def expected_numbers(turns: list[MadeUpTurn], objective: ObjectiveConfig) -> dict[int, float]:
    """Compute each reply's earnings, by its number; conversations here follow one another."""
    trained = set(expected_trained(turns))
    if objective.credit == "episode":
        return dict.fromkeys(trained, math.fsum(turn.reward or 0.0 for turn in turns))
    followers = expected_followers(turns)

    def earned(number: int) -> float | None:
        passed = [reward for f in followers[number] if (reward := earned(f)) is not None]
        back = objective.turn_discount * float(np.mean(passed)) if passed else None
        given = [reward for reward in (turns[number].reward, back) if reward is not None]
        return float(sum(given)) if given else None

    rewards = {number: earned(number) for number in trained}
    return {number: value for number, value in rewards.items() if value is not None}


def expected_followers(turns: list[MadeUpTurn]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in turns]
    root: list[int] = []
    for number, turn in enumerate(turns):
        if turn.parent < number:
            followers[turn.parent].append(number)
            root.append(root[turn.parent])
        else:
            root.append(number)
    members = {key: [n for n in range(len(turns)) if root[n] == key] for key in dict.fromkeys(root)}
    phases: list[list[list[int]]] = []
    for conversation in members.values():
        if phases and conversation[0] < max(max(earlier) for earlier in phases[-1]):
            phases[-1].append(conversation)  # before the others were over
        else:
            phases.append([conversation])
    for phase, after in itertools.pairwise(phases):
        for conversation in phase:
            followers[conversation[-1]] = [later[0] for later in after]
    return followers


def expected_trained(turns: list[MadeUpTurn]) -> list[int]:
    followers = expected_followers(turns)

    def reached(number: int) -> bool:
        return turns[number].reward is not None or any(map(reached, followers[number]))

    def after_reward(number: int) -> bool:
        parent = turns[number].parent
        return turns[number].reward is not None or (parent < number and after_reward(parent))

    return [n for n in range(len(turns)) if reached(n) or after_reward(n)]


def expected_weights(turns: list[MadeUpTurn], objective: ObjectiveConfig) -> dict[int, float]:
    """Compute the chance of each reply on a random path from the beginning."""
    numbers = expected_numbers(turns, objective)
    if objective.credit == "episode":
        return dict.fromkeys(numbers, 1.0)
    followers = expected_followers(turns)
    begins = [n for n in numbers if not any(n in followers[m] for m in numbers)]
    weights = dict.fromkeys(numbers, 0.0)

    def walk(number: int, chance: float) -> None:
        weights[number] += chance
        after = [f for f in followers[number] if f in numbers]
        for follower in after:
            walk(follower, chance / len(after))

    for begin in begins:
        walk(begin, 1 / len(begins))
    return weights


def expected_advantages(
    batch: list[list[list[MadeUpTurn]]], objective: ObjectiveConfig
) -> dict[tuple[int, int, int], float]:
    """Compute advantages by group, episode and number of the reply."""
    units = []  # group, episode, replies, number, weight
    for group, episodes in enumerate(batch):
        for episode, turns in enumerate(episodes):
            numbers = expected_numbers(turns, objective)
            weights = expected_weights(turns, objective)
            if objective.credit == "episode":
                units.append((group, episode, list(numbers), next(iter(numbers.values())), 1.0))
            else:
                units += [(group, episode, [n], numbers[n], weights[n]) for n in numbers]
    differences = []
    for group, episode, _, number, _ in units:
        own = [unit[3] for unit in units if unit[0] == group]
        others = [unit[3] for unit in units if unit[0] == group and unit[1] != episode]
        baseline = {
            "group_mean": np.mean(own),
            "leave_one_out": np.mean(others) if others else number,
            "batch_mean": np.mean([unit[3] for unit in units]),
            "none": 0.0,
        }[objective.baseline]
        differences.append(number - float(baseline))
    advantages = {}
    for (group, episode, replies, _, weight), difference in zip(units, differences, strict=True):
        together = [
            (unit[:2], d)
            for unit, d in zip(units, differences, strict=True)
            if objective.scale_rewards == "batch" or unit[0] == group
        ]
        values = np.array([d for _, d in together])
        one_each = max(Counter(key for key, _ in together).values()) == 1
        centered = (
            objective.baseline == "group_mean"
            or (objective.baseline == "leave_one_out" and one_each)
            or (objective.baseline == "batch_mean" and objective.scale_rewards == "batch")
        )
        if not centered:
            spread = np.sqrt(np.mean(values**2))
        else:
            spread = np.std(values, ddof=objective.std_ddof) if len(values) > 1 else 0.0
        if spread < objective.min_reward_std:
            value = 0.0
        elif objective.scale_rewards == "group_mean":
            mean = float(np.mean([unit[3] for unit in units if unit[0] == group]))
            value = difference / mean if mean > 0 else 0.0
        else:
            value = difference / (1.0 if objective.scale_rewards == "none" else spread)
        for reply in replies:
            advantages[group, episode, reply] = float(value * weight)
    return advantages


@given(BATCHES, OBJECTIVES, st.sampled_from(["concat", "individual"]), st.randoms())
def test_advantages_equal_the_reference_however_rows_are_packed(
    batch: list[list[list[MadeUpTurn]]], objective: ObjectiveConfig, style: Any, random: Any
) -> None:
    expected = expected_advantages(batch, objective)
    rows = build_batch(batch, ExportSettings(style))
    random.shuffle(rows)
    advantages = token_advantages(rows, objective)
    trained = {
        (group, episode, reply)
        for group, episodes in enumerate(batch)
        for episode, turns in enumerate(episodes)
        for reply in expected_trained(turns)
    }
    assert {(group, episode, token // 10) for group, episode, token in advantages} == trained
    for (group, episode, token), advantage in advantages.items():
        target = expected.get((group, episode, token // 10), 0.0)
        assert advantage == pytest.approx(target, rel=1e-6, abs=1e-7)


def test_a_nearly_equal_group_does_not_explode() -> None:
    """Rows (1, 0) and (.5, .5003) of two episodes had advantages of 4,713."""
    batch = [
        [[MadeUpTurn(9, 1.0), MadeUpTurn(9, 0.0)], [MadeUpTurn(9, 0.5), MadeUpTurn(9, 0.5003)]]
    ]
    for credit in ("episode", "turn"):
        rows = build_batch(batch, ExportSettings("individual"))
        advantages = token_advantages(rows, ObjectiveConfig(credit=credit))
        assert max(map(abs, advantages.values())) <= 3 / math.sqrt(4)


def test_what_an_agents_client_passed_back_is_taken_as_it_is() -> None:
    turns = [MadeUpTurn(9, 0.9), MadeUpTurn(0, None), MadeUpTurn(1, 1.0)]
    objective = ObjectiveConfig(baseline="none", scale_rewards="none")
    for style in ("concat", "individual"):
        rows = build_batch([[turns]], ExportSettings(style, is_credited=True))
        advantages = token_advantages(rows, objective)
        assert [advantages[0, 0, token] for token in (0, 10, 20)] == pytest.approx([0.9, 1.0, 1.0])


def test_a_reply_that_was_cut_leaves_the_loss_and_counts_in_its_group() -> None:
    batch = [
        [
            [MadeUpTurn(9, None), MadeUpTurn(0, 1.0, is_cut=True)],
            [MadeUpTurn(9, None), MadeUpTurn(0, 0.0)],
        ]
    ]
    objective = ObjectiveConfig(
        overlong=OverlongConfig(mask=True), loss_agg="seq_mean_token_mean", scale_rewards="none"
    )
    for style in ("concat", "individual"):
        rows = build_batch(batch, ExportSettings(style))
        built = build_rows(rows, WeightVersion(1, 0), [GenerationFork(1, 0)], objective)
        channels = {
            (row.episode, int(training_row.input_ids_T[index]) // 10): (
                float(training_row.channels[Channel.ADVANTAGE][index]),
                float(training_row.channels[Channel.SCALE][index]),
            )
            for row, training_row in zip(rows, built, strict=True)
            for index in np.flatnonzero(training_row.loss_mask_T)
        }
        # Six tokens are left, two of them of the first episode.
        assert channels == {(0, 0): (0.5, 1.5), (1, 0): (-0.5, 0.75), (1, 1): (-0.5, 0.75)}


@pytest.mark.parametrize(
    ("tokens", "expected"), [(4, 0.0), (10, 0.0), (12, 0.25), (18, 1.0), (40, 1.0)]
)
def test_the_penalty_grows_from_the_expected_length(tokens: int, expected: float) -> None:
    """DAPO: 0 up to L_max - L_cache, then a straight line down to -1 at L_max."""
    overlong = OverlongConfig(penalty=1.0, expected_tokens=10, cache_tokens=8)
    assert compute_overlong_penalty(tokens, overlong) == expected
    assert compute_overlong_penalty(tokens, OverlongConfig()) == 0.0


def test_long_replies_earn_less_each_or_in_sum() -> None:
    turns = [MadeUpTurn(9, None, 9), MadeUpTurn(0, None, 2), MadeUpTurn(1, 1.0, 7)]
    overlong = OverlongConfig(penalty=0.5, expected_tokens=5, cache_tokens=4)
    plain: dict[str, Any] = {"baseline": "none", "scale_rewards": "none", "overlong": overlong}
    for style in ("concat", "individual"):
        rows = build_batch([[turns]], ExportSettings(style))
        advantages = token_advantages(rows, ObjectiveConfig(**plain))
        assert set(advantages.values()) == {0.25}
        advantages = token_advantages(rows, ObjectiveConfig(credit="turn", **plain))
        assert [advantages[0, 0, token] for token in (0, 10, 20)] == [0.25, 0.75, 0.75]


def test_a_penalty_is_taken_off_what_a_client_passed_back() -> None:
    turns = [MadeUpTurn(9, None, 9), MadeUpTurn(0, 2.0, 9)]
    overlong = OverlongConfig(penalty=0.5, expected_tokens=5, cache_tokens=4)
    objective = ObjectiveConfig(baseline="none", scale_rewards="none", overlong=overlong)
    rows = build_batch([[turns]], ExportSettings(is_credited=True))
    advantages = token_advantages(rows, objective)
    assert [advantages[0, 0, token] for token in (0, 10)] == [1.5, 1.5]


def test_of_two_successes_the_shorter_earns_more() -> None:
    group = [[MadeUpTurn(9, 1.0, 2)], [MadeUpTurn(9, 1.0, 6)], [MadeUpTurn(9, 0.0, 1)]]
    objective = ObjectiveConfig(baseline="none", scale_rewards="none", brevity_bonus=1.0)
    advantages = token_advantages(build_batch([group], ExportSettings()), objective)
    assert {(key[1], value) for key, value in advantages.items()} == {(0, 1.5), (1, 1.0), (2, 0.0)}
