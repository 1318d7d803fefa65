"""Advantages and returns from a critic's values equal references written out literally."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.trainer.batch.packing import Channel
from areal_hpc.trainer.batch.training_rows import BatchScores, build_rows
from areal_hpc.trainer.objective.policy_loss import compute_value_loss
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.bias import compute_expected_gradient, measure_cosine
from tests.support.loss_reference import sum_discounted_errors, value_loss_and_gradient
from tests.support.sample_episodes import MadeUpTurn, build_batch
from tests.support.toy_tasks import (
    CONTEXTS,
    ToyTask,
    compute_values,
    list_linear_episodes,
    make_policy,
    make_task,
)

BEGINNING = 99
"""Parent of a reply that begins a conversation."""
Pairs = dict[tuple[int, int, int], tuple[float, float]]
"""Advantage and return of each trained token, by its ticket, episode and id, unique there."""


def value_of(ticket: int, episode: int, token: int) -> float:
    """Return the critic's value before a token, the same in every row."""
    return float(np.float32(np.sin(1.0 + token + 17 * episode + 31 * ticket)))


def make_objective(**keys: Any) -> ObjectiveConfig:
    tree = {"baseline": "value", "scale_rewards": "none", "critic": {"model": "initial"}, **keys}
    return ObjectiveConfig.model_validate(tree)


def estimate(
    rows: list[TrajectoryRow], objective: ObjectiveConfig, scores: BatchScores | None = None
) -> Pairs:
    values = [
        np.array([value_of(row.ticket_id, row.episode, int(id_)) for id_ in row.input_ids_T],
                 np.float32)
        for row in rows
    ]  # fmt: skip
    scores = replace(scores or BatchScores(), values=values)
    built = build_rows(rows, WeightVersion(1, 0), [GenerationFork(1, 0)], objective, scores)
    pairs: Pairs = {}
    for row, training_row in zip(rows, built, strict=True):
        for index in np.flatnonzero(training_row.loss_mask_T):
            key = (row.ticket_id, row.episode, int(row.input_ids_T[index]))
            assert key not in pairs
            channels = training_row.channels
            pairs[key] = (
                float(channels[Channel.ADVANTAGE][index]),
                float(channels.get(Channel.RETURN, channels[Channel.ADVANTAGE])[index]),
            )
    return pairs


def make_conversation(lengths: list[int], rewards: list[float | None]) -> list[MadeUpTurn]:
    parents = [BEGINNING, *range(len(lengths) - 1)]
    return [MadeUpTurn(*fields) for fields in zip(parents, rewards, lengths, strict=True)]


CONVERSATIONS = st.integers(1, 4).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 4), min_size=count, max_size=count),
        st.lists(st.sampled_from([0.0, 0.5, 1.0, -3.0]), min_size=count, max_size=count),
    )
)


@given(
    conversation=CONVERSATIONS,
    credit=st.sampled_from(["episode", "turn"]),
    discount=st.sampled_from([1.0, 0.9]),
    gae_lambda=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_advantages_are_sums_of_discounted_errors(
    conversation: tuple[list[int], list[float]], credit: str, discount: float, gae_lambda: float
) -> None:
    lengths, rewards = conversation
    rows = build_batch([[make_conversation(lengths, [*rewards])]], ExportSettings())
    pairs = estimate(rows, make_objective(credit=credit, discount=discount, gae_lambda=gae_lambda))
    values = [
        [value_of(0, 0, 10 * turn + index) for index in range(length)]
        for turn, length in enumerate(lengths)
    ]
    given_ = rewards if credit == "turn" else [0.0] * (len(rewards) - 1) + [sum(rewards)]
    turns = list(zip(values, given_, strict=True))
    expected = np.concatenate(sum_discounted_errors(turns, discount, gae_lambda))
    flat = [value for turn_values in values for value in turn_values]
    for (advantage, aim), total, value in zip(pairs.values(), expected, flat, strict=True):
        assert advantage == pytest.approx(total, rel=1e-6, abs=1e-6), "stored in float32"
        assert aim == pytest.approx(total + value, rel=1e-6, abs=1e-6)


@st.composite
def made_up_trees(draw: st.DrawFn) -> list[MadeUpTurn]:
    reward = st.sampled_from([None, 0.0, 0.5, 1.0, -3.0])
    turns = [
        MadeUpTurn(draw(st.integers(0, 3)), draw(reward), draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 5)))
    ]
    return [*turns[:-1], replace(turns[-1], reward=1.0)]


BATCHES = st.lists(st.lists(made_up_trees(), min_size=1, max_size=3), min_size=1, max_size=2)


@given(groups=BATCHES, unit=st.sampled_from(["token", "turn"]),
       credit=st.sampled_from(["episode", "turn"]))  # fmt: skip
def test_rows_decide_nothing(groups: list[list[list[MadeUpTurn]]], unit: str, credit: str) -> None:
    objective = make_objective(gae_unit=unit, credit=credit, discount=0.9)
    first, second = (
        estimate(build_batch(groups, settings_), objective)
        for settings_ in (ExportSettings("individual"), ExportSettings("concat"))
    )
    assert first.keys() == second.keys()
    for key, pair in first.items():
        assert pair == pytest.approx(second[key], rel=1e-6, abs=1e-6)


@given(groups=BATCHES, credit=st.sampled_from(["episode", "turn"]))
def test_a_value_may_be_a_baseline(groups: list[list[list[MadeUpTurn]]], credit: str) -> None:
    """Advantages are a reply's earnings less the critic's value, also in a tree."""
    rows = build_batch(groups, ExportSettings())
    earned = estimate(
        rows,
        ObjectiveConfig(baseline="none", scale_rewards="none", credit=credit),  # type: ignore[arg-type]
    )
    pairs = estimate(rows, make_objective(credit=credit, gae_lambda=1.0))
    for (ticket, episode, token), (advantage, aim) in pairs.items():
        value, (times_weight, _) = value_of(ticket, episode, token), earned[ticket, episode, token]
        if times_weight == 0.0:
            continue  # earned nothing, or is not reached
        weight = times_weight / aim
        assert 0 < weight <= 1 + 1e-6
        assert advantage == pytest.approx((aim - value) * weight, rel=1e-4, abs=1e-5)


def test_a_turn_as_a_step_gives_the_numbers_of_areal() -> None:
    """V_u before its first token, delta_u = r_u + g V_u+1 - V_u, A_u to all of its tokens."""
    rows = build_batch([[make_conversation([2, 3], [0.5, 2.0])]], ExportSettings())
    objective = make_objective(credit="turn", gae_unit="turn", discount=0.9, gae_lambda=0.8)
    estimates = estimate(rows, objective)
    first, second = value_of(0, 0, 0), value_of(0, 0, 10)
    late = 2.0 - second
    early = 0.5 + 0.9 * second - first + 0.9 * 0.8 * late
    pairs = [(early, early + first)] * 2 + [(late, late + second)] * 3
    for pair, expected in zip(estimates.values(), pairs, strict=True):
        assert pair == pytest.approx(expected, rel=1e-6)


def test_a_branch_is_followed_by_the_mean_of_both() -> None:
    turns = [MadeUpTurn(BEGINNING, None), MadeUpTurn(0, 1.0), MadeUpTurn(0, 0.0)]
    rows = build_batch([[turns]], ExportSettings())
    pairs = estimate(rows, make_objective(credit="turn", gae_lambda=1.0))
    assert pairs[0, 0, 0][1] == pytest.approx(0.5)
    assert pairs[0, 0, 10] == pytest.approx(((1.0 - value_of(0, 0, 10)) / 2, 1.0), rel=1e-6)


def test_a_penalty_is_taken_off_at_each_token() -> None:
    rows = build_batch([[make_conversation([2], [1.0])]], ExportSettings())
    start = [np.where(row.loss_mask_T != 0, 0.25, 0.0).astype(np.float32) for row in rows]
    scores = BatchScores(start, [np.zeros_like(part) for part in start])
    objective = make_objective(gae_lambda=1.0, kl={"coef": 2.0})
    pairs = estimate(rows, objective, scores)
    assert [aim for _, aim in pairs.values()] == pytest.approx([0.0, 0.5])


def test_a_reply_that_is_not_trained_hands_its_reward_on() -> None:
    """The second reply is greedy: no token of it is a step."""
    turns = [MadeUpTurn(BEGINNING, 0.0), MadeUpTurn(0, 1.0, is_greedy=True)]
    rows = build_batch([[turns]], ExportSettings())
    pairs = estimate(rows, make_objective(credit="turn", gae_lambda=0.0))
    assert [*pairs] == [(0, 0, 0), (0, 0, 1)]
    assert pairs[0, 0, 1][1] == pytest.approx(1.0)


EXACT: dict[str, Any] = {"surrogate": "none", "loss_agg": "seq_mean_token_sum"}


def measure_bias(task: ToyTask, critic: Any, gae_lambda: float, credit: str = "turn") -> float:
    """Return 1 minus the cosine of the expected gradient and the true one."""
    objective = make_objective(credit=credit, gae_lambda=gae_lambda, **EXACT)
    alone = replace(task, critic=critic, begun=1)  # groups are not compared
    gradient = compute_expected_gradient(alone, objective)
    return 1 - measure_cosine(gradient, task.truth)


@pytest.mark.parametrize("kind", ["graded", "turn"])
@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_a_wrong_critic_does_no_harm_where_all_that_came_counts(kind: str, credit: str) -> None:
    task = make_task(list_linear_episodes(1, kind), make_policy(1))
    wrong = np.random.default_rng(4).normal(size=CONTEXTS)
    assert measure_bias(task, wrong, 1.0, credit) <= 1e-9
    assert measure_bias(task, wrong, 0.5, credit) > 1e-3
    assert measure_bias(task, wrong, 0.0, credit) > measure_bias(task, wrong, 0.5, credit)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
def test_a_critic_that_is_right_follows_the_true_gradient(gae_lambda: float) -> None:
    task = make_task(list_linear_episodes(2, "turn"), make_policy(2))
    assert measure_bias(task, compute_values(task), gae_lambda) <= 1e-9


@pytest.mark.parametrize("clip_value", [None, 0.2, 0.6])
def test_the_value_loss_equals_the_reference(clip_value: float | None) -> None:
    generator, acted = np.random.default_rng(5), 0
    for _ in range(10):
        before, returns = generator.normal(size=(2, 30))
        values = before + generator.normal(0, 0.5, 30)
        expected, slopes = value_loss_and_gradient(values, before, returns, clip_value)
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            values_N = torch.tensor(values, dtype=dtype, requires_grad=True)
            before_N, returns_N = (torch.tensor(array, dtype=dtype) for array in (before, returns))
            total, sums = compute_value_loss(values_N, before_N, returns_N, clip_value)
            (total / 30).backward()
            assert total.item() / 30 == pytest.approx(expected, rel=bound * 10)
            assert values_N.grad is not None
            assert np.abs(values_N.grad.double().numpy() - slopes).max() <= bound
            assert sums["tokens"] == 30
            acted += int(sums["value_clipped"])
    assert (acted > 0) is (clip_value is not None)


def test_values_that_moved_within_the_clip_are_not_counted_as_clipped() -> None:
    """One value moved by .013 under a clip of .2: its sum with the value before is rounded."""
    before = torch.tensor([0.01703648827970028, 0.5, 0.5])
    values = torch.tensor([0.004138512071222067, 0.9, 0.1])
    _, sums = compute_value_loss(values, before, torch.zeros(3), clip_value=0.2)
    assert sums["value_clipped"].item() == 1.0
