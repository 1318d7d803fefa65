from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc.trainer.cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.batch.experience import (
    ADVANTAGE,
    AGE,
    CURRENT,
    Batch,
    describe,
    make_rows,
    same_weights,
)
from areal_hpc.trainer.config import ObjectiveConfig
from areal_hpc.trajectory import Trajectory
from areal_hpc.weights.version import Fork, WeightVersion

NOW = WeightVersion(1, 9)
STRETCHES = st.lists(
    st.tuples(st.sampled_from([None, 3, 7, 9]), st.integers(1, 5)), min_size=1, max_size=6
)
"""Steps of the weights that sampled some tokens, None where nobody did; and how many tokens."""


def row(episode: int, stretches: list[tuple[int | None, int]], reward: float = 1.0) -> Trajectory:
    steps = [step for step, tokens in stretches for _ in range(tokens)]
    sampled = np.array([step is not None for step in steps])
    packed = [-1 if step is None else WeightVersion(1, step).packed for step in steps]
    return Trajectory(
        ticket_id=0,
        attempt=1,
        episode=episode,
        row=0,
        input_ids_T=np.arange(len(steps), dtype=np.int32),
        loss_mask_T=sampled.astype(np.uint8),
        logprobs_T=np.zeros(len(steps), np.float32),
        versions_T=np.array(packed, np.int64),
        reward=reward,
    )


@given(st.lists(STRETCHES, min_size=1, max_size=5))
def test_a_batch_is_described_as_its_tokens_say_one_by_one(
    rows: list[list[tuple[int | None, int]]],
) -> None:
    rows[0].append((3, 1))  # a batch has at least one sampled token
    batch = Batch([row(i, stretches) for i, stretches in enumerate(rows)], [1.0] * len(rows))
    found = describe(batch, NOW, [Fork(1, 0)])
    steps = [[step for step, tokens in one for _ in range(tokens) if step] for one in rows]
    ages = [9 - step for one in steps for step in one]
    assert found["tokens/sampled"] == len(ages)
    assert found["staleness/max"] == max(ages)
    np.testing.assert_allclose(found["staleness/mean"], np.mean(ages))
    assert found["versions/multi"] == sum(len(set(one)) > 1 for one in steps)


def test_every_token_of_a_row_gets_the_rows_advantage_and_says_who_sampled_it() -> None:
    rows = [row(0, [(None, 2), (9, 1), (3, 2)], reward=1.0), row(1, [(9, 2)], reward=0.0)]
    good, bad = make_rows(Batch(rows, [1.0, 0.0]), NOW, [Fork(1, 0)], ObjectiveConfig())
    assert AGE not in good.channels
    np.testing.assert_allclose(good.channels[ADVANTAGE], np.full(5, 0.5**0.5), rtol=1e-6)
    np.testing.assert_allclose(bad.channels[ADVANTAGE], np.full(2, -(0.5**0.5)), rtol=1e-6)
    assert good.channels[CURRENT].tolist() == [0, 0, 1, 0, 0]


def test_a_log_linear_proximal_policy_needs_the_age_of_every_token() -> None:
    rows = [row(0, [(None, 1), (3, 2), (9, 1), (3, 1)])]
    config = ObjectiveConfig(proximal="log_linear")
    (found,) = make_rows(Batch(rows, [1.0]), NOW, [Fork(1, 0)], config)
    assert found.channels[AGE].tolist() == [0, 6, 6, 0, 6]


def test_a_restart_renames_the_weights_of_the_commit_alone() -> None:
    forks = [Fork(1, 0), Fork(2, 4), Fork(3, 9)]
    assert same_weights(WeightVersion(2, 4), forks) == [WeightVersion(1, 4), WeightVersion(2, 4)]
    # 1.5 was trained after the commit and lost: 2.5 are other weights of the same step.
    assert same_weights(WeightVersion(2, 5), forks) == [WeightVersion(2, 5)]
    assert same_weights(WeightVersion(3, 9), forks) == [WeightVersion(2, 9), WeightVersion(3, 9)]
