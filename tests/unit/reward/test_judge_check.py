"""Agreement of values with labels, and rewards that are sums of weighted parts."""

import math

import numpy as np
import pytest

from areal_hpc import Reward
from areal_hpc.errors import InvalidRewardError
from areal_hpc.reward.judge_check import measure_agreement


def test_agreement_of_equal_opposite_and_random_values() -> None:
    labels = [0.0, 0.25, 0.75, 1.0]
    same = measure_agreement(labels, labels)
    assert (same.mean_difference, same.mean_abs_difference) == (0.0, 0.0)
    assert (same.rank_correlation, same.kappa) == pytest.approx((1.0, 1.0))
    opposite = measure_agreement(labels[::-1], labels)
    assert (opposite.rank_correlation, opposite.kappa) == pytest.approx((-1.0, -1.0))
    generator = np.random.default_rng(1)
    values, others = generator.random(4000), generator.random(4000)
    random = measure_agreement(list(values), list(others))
    assert abs(random.rank_correlation) < 0.05
    assert abs(random.kappa) < 0.05
    squared = measure_agreement(list(values**2), list(values))
    assert squared.rank_correlation == pytest.approx(1.0), "ranks alone count"


def test_agreement_by_hand_with_ties() -> None:
    found = measure_agreement([1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.25, 0.0])
    assert found.mean_difference == pytest.approx(0.1875)
    # Ranks 3.5, 1.5, 1.5, 3.5 and 4, 1.5, 3, 1.5.
    assert found.rank_correlation == pytest.approx(np.corrcoef([3.5, 1.5, 1.5, 3.5],
                                                               [4, 1.5, 3, 1.5])[0, 1])  # fmt: skip
    assert found.kappa == pytest.approx((0.75 - 0.5) / 0.5)


def test_agreement_where_nothing_varies() -> None:
    found = measure_agreement([1.0, 1.0], [1.0, 1.0])
    assert math.isnan(found.rank_correlation)
    assert math.isnan(found.kappa)
    with pytest.raises(ValueError, match="expected a label for each value, got 1 and 0"):
        measure_agreement([1.0], [])


def test_a_reward_of_weighted_parts() -> None:
    weights = {"correct": 0.8, "style": 0.2}
    reward = Reward.from_weighted_parts({"correct": 1.0, "style": 0.4}, weights, note="kind")
    assert reward.value == pytest.approx(0.88)
    assert reward.parts == pytest.approx({"correct": 0.8, "style": 0.08})
    assert reward.metrics == {"correct": 1.0, "style": 0.4}
    assert reward.note == "kind"
    with pytest.raises(InvalidRewardError, match="expected a weight for each part"):
        Reward.from_weighted_parts({"correct": 1.0}, weights)
