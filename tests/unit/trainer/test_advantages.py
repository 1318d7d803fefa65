import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.trainer.objective.advantages import compute_group_advantages


def test_a_group_is_judged_against_its_own_mean() -> None:
    advantages = compute_group_advantages(
        [1.0, 0.0, 5.0, 5.0, 7.0], [3, 3, 9, 9, 9], [0, 1, 0, 1, 2], 1e-4
    )
    assert advantages[:2] == pytest.approx([2**-0.5, -(2**-0.5)])
    assert advantages[2] == advantages[3] < 0 < advantages[4]


def test_a_group_that_agrees_teaches_nothing() -> None:
    advantages = compute_group_advantages([1.0, 1.0, 0.5], [0, 0, 1], [0, 1, 0], 1e-4)
    assert advantages.tolist() == [0.0] * 3


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=40))
def test_advantages_of_a_group_add_up_to_nothing(rows: list[tuple[float, int]]) -> None:
    rewards, groups = zip(*rows, strict=True)
    advantages = compute_group_advantages(rewards, groups, range(len(rewards)), 1e-4)
    for group in set(groups):
        own = advantages[np.array(groups) == group]
        assert abs(own.sum()) < 1e-3
        assert len(own) < 2 or own.std(ddof=1) == pytest.approx(1.0, abs=1e-3) or not own.any()


def test_an_episode_that_forked_into_many_rows_counts_once() -> None:
    plain = compute_group_advantages([1.0, 0.0, 0.0], [7, 7, 7], [0, 1, 2], 1e-4)
    forked = compute_group_advantages([1.0, 0.0, 0.0, 0.0, 0.0], [7] * 5, [0, 1, 1, 1, 2], 1e-4)
    assert forked[0] == pytest.approx(plain[0])
    assert forked[1:].tolist() == pytest.approx([plain[1]] * 4)
