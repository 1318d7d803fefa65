"""Metrics of an evaluation set by the names of a recipe."""

import re

import pytest

from areal_hpc.evaluation.set_metrics import (
    METRIC_PATTERN,
    SetSamples,
    build_metric_row,
    estimate_metrics,
)


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
    found = estimate_metrics(SAMPLES, ("pass@1", "pass@k", "cons@k"), 1.0)
    values = {name: one.value for name, one in found.items()}
    assert values == pytest.approx(
        {"avg@4": (0.3 + 0 + 1) / 3, "pass@1": (0.25 + 0 + 1) / 3, "pass@4": 2 / 3, "cons@4": 1 / 3}
    )


def test_a_metric_of_more_samples_than_were_played_is_left_out() -> None:
    """`eval --compare STEP` with more samples than the run played: other numbers are compared."""
    found = estimate_metrics(SetSamples([[1.0, 0.0], [0.0, 0.0]]), ("pass@8", "pass@2"), 1.0)
    assert set(found) == {"avg@2", "pass@2"}


def test_tasks_with_the_same_rewards_in_another_order_score_the_same() -> None:
    """Or they would seem to differ by 1e-16, and the interval would have no width."""
    samples = SetSamples([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]] * 15)
    found = estimate_metrics(samples, (), 1.0)["avg@3"]
    assert found.high - found.low > 0.2


def test_a_row_has_each_metric_with_its_interval() -> None:
    row = build_metric_row("aime", estimate_metrics(SAMPLES, (), 1.0))
    assert list(row) == [f"evaluation/aime/avg@4{end}" for end in ("", "_low", "_high")]
    one_task = estimate_metrics(SetSamples([[2.0]]), (), 1.0)
    assert build_metric_row("one", one_task) == {"evaluation/one/avg@1": 2.0}, "no bound is finite"
