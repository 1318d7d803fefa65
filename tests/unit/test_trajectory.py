"""What makes a row unfit to train on."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from areal_hpc.wire.agent_reward import MAX_REWARD
from areal_hpc.wire.trajectory import find_row_defect
from tests.support.sample_trajectories import trajectory

SOUND = trajectory(tokens=6)
IDS, LOGPROBS = SOUND.input_ids_T, SOUND.logprobs_T


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids_T": IDS - 1}, "expected token ids from 0 to 5, got -1"),
        ({"input_ids_T": IDS + 1}, "expected token ids from 0 to 5, got 6"),
        ({"loss_mask_T": np.full(6, 2, np.uint8)}, "expected a loss mask of 0 and 1, got 2"),
        ({"logprobs_T": LOGPROBS * np.float32("nan")}, "expected finite log-probabilities"),
        ({"logprobs_T": LOGPROBS - np.float32("inf")}, "expected finite log-probabilities"),
        ({"versions_T": np.full(6, -1, np.int64)}, "expected a weight version for every sampled"),
        ({"reward": float("nan")}, "expected a finite 32-bit float as reward, got nan"),
        ({"reward": 2 * MAX_REWARD}, "expected a finite 32-bit float as reward"),
        ({"temperature": -0.1}, "expected a temperature from 0 to 100, got -0.1"),
        ({"temperature": 1e300}, "expected a temperature from 0 to 100, got 1e+300"),
        ({"temperature": float("nan")}, "expected a temperature from 0 to 100, got nan"),
        ({"episode": 2**31}, "expected attempt, episode and row from 0 to 2**31 - 1"),
        ({"attempt": 2**40}, "expected attempt, episode and row from 0 to 2**31 - 1"),
    ],
)
def test_a_defect_is_named_with_what_was_expected(change: dict[str, Any], said: str) -> None:
    assert find_row_defect(SOUND, vocab_size=6) is None
    assert said in str(find_row_defect(dataclasses.replace(SOUND, **change), vocab_size=6))


def test_versions_of_tokens_that_nobody_sampled_do_not_matter() -> None:
    assert (SOUND.versions_T == -1).any()
    assert find_row_defect(trajectory(tokens=0)) is None
