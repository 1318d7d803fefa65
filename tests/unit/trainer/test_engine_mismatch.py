"""The log-probability drift check: its sums, and percentiles out of a histogram."""

import math

import pytest
import torch

from areal_hpc.trainer.objective.loss_stats import (
    estimate_abs_diff_percentile,
    measure_engine_mismatch,
)


def test_mean_maximum_and_k3_are_those_of_the_tokens_that_are_compared() -> None:
    trainer, engine = torch.tensor([-1.0, -2.0, -5.0]), torch.tensor([-1.5, -2.0, 0.0])
    found = measure_engine_mismatch(trainer, engine, torch.tensor([True, True, False]))
    assert found.sums["compared"] == 2
    assert found.sums["mismatch_abs"] == pytest.approx(0.5)
    assert found.sums["mismatch_kl"] == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert found.max_abs_diff == 0.5
    assert int(found.histogram_B.sum()) == 2


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.5, 40.0])
def test_a_percentile_is_within_four_percent_also_when_parts_are_added_up(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    diffs = torch.rand(10_000, generator=generator, dtype=torch.float64) * scale
    everyone = torch.ones(5000, dtype=torch.bool)
    parts = [measure_engine_mismatch(part, 0 * part, everyone) for part in diffs.split(5000)]
    histogram = parts[0].histogram_B + parts[1].histogram_B
    largest = max(float(part.max_abs_diff) for part in parts)
    expected = float(torch.quantile(diffs, 0.99))
    assert estimate_abs_diff_percentile(histogram, 0.99, largest) == pytest.approx(
        expected, rel=0.04
    )


def test_no_tokens_equal_tokens_and_numbers_that_are_none_are_no_trouble() -> None:
    none = measure_engine_mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert float(none.sums["compared"]) == 0.0
    assert estimate_abs_diff_percentile(none.histogram_B, 0.99, 0.0) == 0.0
    equal = measure_engine_mismatch(torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert estimate_abs_diff_percentile(equal.histogram_B, 0.99, float(equal.max_abs_diff)) == 0.0
    odd = torch.tensor([math.nan, -math.inf])
    found = measure_engine_mismatch(odd, torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert math.isnan(found.sums["mismatch_abs"])
    assert int(found.histogram_B.sum()) == 2
