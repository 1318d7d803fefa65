"""What an agent may return as a reward, and what it is told of anything else."""

import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

import areal_hpc
from areal_hpc.errors import InvalidRewardError
from areal_hpc.wire.agent_reward import Reward


def test_a_reward_holds_plain_numbers_whatever_numbers_it_was_given() -> None:
    parts: dict[str, Any] = {"correct": True, "format": np.float32(0.25)}
    reward = areal_hpc.Reward(
        np.float64(1), parts=parts, metrics={"tool/errors": 2}, note="half \ud83d"
    )
    assert reward.value == 1.0
    numbers = [reward.value, *reward.parts.values(), *reward.metrics.values()]
    assert {type(number) for number in numbers} == {float}
    assert reward.note == "half \\ud83d"
    assert pickle.loads(pickle.dumps(reward)) == reward  # from a process of our own
    assert msgspec.json.decode(msgspec.json.encode(reward), type=Reward) == reward


@pytest.mark.parametrize(
    ("value", "more", "said"),
    [
        ("1", {}, "reward: expected a finite float, got '1' (str)"),
        (math.nan, {}, "reward: expected a finite 32-bit float, got nan"),
        (1.0, {"parts": {"a": None}}, "parts.a: expected a finite float, got None (NoneType)"),
        (1.0, {"metrics": {"a": math.inf}}, "metrics.a: expected a finite 32-bit float, got inf"),
        (1.0, {"parts": [1.0]}, "parts: expected numbers by name, got [1.0] (list)"),
        (1.0, {"parts": {"a b": 1.0}}, "parts: expected names of at most 64 letters"),
        (1.0, {"parts": {"": 1.0}}, "parts: expected names of at most 64 letters"),
        (1.0, {"metrics": {str(i): 1.0 for i in range(65)}}, "at most 64 names, got 65"),
        (1.0, {"note": 5}, "note: expected a text of at most 4000 characters, got 5 (int)"),
        (1.0, {"note": "x" * 4001}, "at most 4000 characters, got 4001"),
    ],
)
def test_what_is_no_reward_is_refused_where_it_is_made(
    value: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRewardError) as caught:
        Reward(value, **more)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400
