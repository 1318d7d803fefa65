"""Estimates and metrics of evaluation sets equal enumeration, and hold in simulations."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.evaluation.set_metrics import (
    METRIC_PATTERN,
    SetSamples,
    build_metric_row,
    estimate_metrics,
)
from areal_hpc.evaluation.statistics import (
    compare_paired,
    compute_central_probability,
    compute_central_quantile,
    compute_pass_at_k_by_task,
    estimate_mean,
    score_majority_answer,
)

SIMULATIONS = 2000


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_passing_choices(passes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passes)))
    chosen = [any(choice) for choice in itertools.combinations(passes, k)]
    [estimate] = compute_pass_at_k_by_task([sum(passes)], len(passes), k)
    assert estimate == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


# Tables of the distribution print these to three or more digits.
@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (29, 2.04523), (299, 1.96793)],
)
def test_t_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert compute_central_quantile(0.95, degrees) == pytest.approx(quantile, abs=1e-4)
    assert compute_central_probability(quantile, degrees) == pytest.approx(0.95, abs=1e-5)


@pytest.mark.parametrize("n_samples", [1, 8])
@pytest.mark.parametrize("n_tasks", [30, 300])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 0.5)])
def test_intervals_of_avg_at_k_hold_the_truth_19_times_in_20(
    n_tasks: int, n_samples: int, alpha: float, beta: float
) -> None:
    """Samples of one task share its difficulty, and tasks differ in it."""
    random = np.random.default_rng(7)
    truth, covered = alpha / (alpha + beta), 0
    for _ in range(SIMULATIONS):
        passes_T = random.binomial(n_samples, random.beta(alpha, beta, n_tasks))
        estimate = estimate_mean(passes_T / n_samples)
        covered += estimate.low <= truth <= estimate.high
    assert 0.93 <= covered / SIMULATIONS <= 0.97


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("n_tasks", [30, 300])
def test_intervals_of_pass_at_k_hold_the_truth_19_times_in_20(n_tasks: int, k: int) -> None:
    """Uniform p gives E[1 - (1 - p)^k] = 1 - 1 / (k + 1)."""
    random = np.random.default_rng(11)
    truth, covered, n_samples = 1 - 1 / (k + 1), 0, 8
    for _ in range(SIMULATIONS):
        passes_T = random.binomial(n_samples, random.random(n_tasks))
        estimate = estimate_mean(compute_pass_at_k_by_task(passes_T.tolist(), n_samples, k))
        covered += estimate.low <= truth <= estimate.high
    assert 0.93 <= covered / SIMULATIONS <= 0.97


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_intervals_of_shares_stay_shares_and_hold_the_mean(values: list[float]) -> None:
    estimate = estimate_mean(values)
    assert 0 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1


@pytest.mark.parametrize("value", [0.1, 0.2, 0.7])
@pytest.mark.parametrize("n_tasks", [2, 3, 6, 7, 10, 30, 64, 100, 256])
def test_tasks_that_earn_the_same_have_an_interval_with_a_width(value: float, n_tasks: int) -> None:
    """Rounding of their sum could make them seem to differ by 1e-17."""
    estimate = estimate_mean([value] * n_tasks)
    assert estimate.value == pytest.approx(value)
    t_squared = compute_central_quantile(0.95, n_tasks - 1) ** 2
    variance = value * (1 - value)
    half = math.sqrt(t_squared / (n_tasks + t_squared) * variance)  # or more, by Wilson
    assert estimate.high - estimate.low > half


@pytest.mark.parametrize(
    ("answers", "passes", "consensus"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["4", "5", "5"], [True, False, False], 0.0),
        (["4", "5"], [True, False], 0.5),
        (["4", "", "", ""], [True, False, False, False], 1.0),
        (["", ""], [False, True], 0.0),
    ],
)
def test_consensus_is_a_majority(answers: list[str], passes: list[bool], consensus: float) -> None:
    assert score_majority_answer(answers, passes) == consensus


def test_paired_test_finds_what_unpaired_intervals_hide() -> None:
    """Hard and easy tasks differ far more than the checkpoints do."""
    random = np.random.default_rng(3)
    hardness = random.random(100)
    first, second = hardness * 0.9, hardness * 0.9 + 0.05 + 0.02 * random.random(100)
    pairs = compare_paired(first.tolist(), second.tolist())
    assert (pairs.better, pairs.worse) == (100, 0)
    assert 0.05 < pairs.difference.low < pairs.difference.high < 0.07
    assert pairs.p_value < 0.001
    assert estimate_mean(first).high > estimate_mean(second).low


@pytest.mark.parametrize(("n_tasks", "is_shown"), [(2, False), (5, False), (6, True)])
def test_a_few_tasks_that_differ_alike_show_no_difference(n_tasks: int, is_shown: bool) -> None:
    """Equal differences have no spread: an interval of two tasks would exclude 0 for certain."""
    pairs = compare_paired([1.0] * n_tasks, [0.0] * n_tasks)
    assert (pairs.difference.high < 0) is is_shown is (pairs.p_value < 0.05)
    assert pairs.difference.low <= pairs.difference.value == -1.0


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_the_interval_of_a_difference_says_what_its_p_value_says(values: list[float]) -> None:
    pairs = compare_paired([0.0] * len(values), values)
    assert pairs.difference.low <= pairs.difference.value <= pairs.difference.high
    assert pairs.difference.low < pairs.difference.high
    if abs(pairs.p_value - 0.05) > 1e-9 and max(map(abs, values)) > 1e-6:
        assert (pairs.p_value <= 0.05) == (not pairs.difference.low <= 0 <= pairs.difference.high)


def test_a_recipe_may_ask_for_metrics_of_these_names_alone() -> None:
    for name in ("avg@k", "cons@k", "pass@k", "pass@1", "pass@16"):
        assert re.match(METRIC_PATTERN, name)
    for name in ("avg", "avg@4", "pass@0", "pass", "maj@k", "pass@k2"):
        assert not re.match(METRIC_PATTERN, name)


SAMPLES = SetSamples(
    [[1.0, 0.0, 0.0, 0.2], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]],
    [["4", "5", "5", ""], ["1", "2", "3", "4"], ["7", "7", "7", "7"]],
)


def test_metrics_are_those_asked_for_and_always_avg() -> None:
    metrics = estimate_metrics(SAMPLES, ("pass@1", "pass@k", "cons@k"), 1.0)
    values = {name: estimate.value for name, estimate in metrics.items()}
    assert values == pytest.approx(
        {"avg@4": (0.3 + 0 + 1) / 3, "pass@1": (0.25 + 0 + 1) / 3, "pass@4": 2 / 3, "cons@4": 1 / 3}
    )


def test_a_metric_of_more_samples_than_were_played_is_left_out() -> None:
    """`eval --compare STEP` may ask for more samples than the run played."""
    metrics = estimate_metrics(SetSamples([[1.0, 0.0], [0.0, 0.0]]), ("pass@8", "pass@2"), 1.0)
    assert set(metrics) == {"avg@2", "pass@2"}


def test_tasks_with_the_same_rewards_in_another_order_score_the_same() -> None:
    """Rounding could make them differ by 1e-16 and leave the interval without a width."""
    samples = SetSamples([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]] * 15)
    estimate = estimate_metrics(samples, (), 1.0)["avg@3"]
    assert estimate.high - estimate.low > 0.2


def test_a_row_has_each_metric_with_its_interval() -> None:
    row = build_metric_row("aime", estimate_metrics(SAMPLES, (), 1.0))
    assert list(row) == [f"evaluation/aime/avg@4{end}" for end in ("", "_low", "_high")]
    one_task = estimate_metrics(SetSamples([[2.0]]), (), 1.0)
    assert build_metric_row("one", one_task) == {"evaluation/one/avg@1": 2.0}, "no bound is finite"
