import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import AgentError
from areal_hpc.rollout.episodes.episode import parse_agent_rewards
from areal_hpc.wire.agent_reward import Reward


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_finite_float_goes_to_the_last_interaction(reward: float) -> None:
    assert parse_agent_rewards(reward) == {None: Reward(reward)}


@pytest.mark.parametrize(
    "reward", [1, True, False, np.float32(0.5), np.int64(2), np.bool_(True), np.array(3.0)]
)
def test_other_real_numbers_become_floats(reward: Any) -> None:
    (given,) = parse_agent_rewards(reward).values()
    assert type(given.value) is float
    assert given.value == reward


@given(st.dictionaries(st.text(), st.floats(-1e6, 1e6), min_size=1))
def test_dict_gives_every_interaction_its_reward(rewards: dict[str, float]) -> None:
    assert parse_agent_rewards(rewards) == {name: Reward(one) for name, one in rewards.items()}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned None (NoneType), expected a finite float"),
        ("0.5", "returned '0.5' (str), expected a finite float"),
        (1j, "(complex)"),
        ([1.0], "(list)"),
        (math.nan, "returned nan (float), expected a finite float"),
        (math.inf, "returned inf"),
        (np.float32("-inf"), "returned np.float32(-inf) (float32)"),
        ({}, "an empty dict"),
        ({"chatcmpl-1": math.nan}, "returned nan (float) for chatcmpl-1"),
        ({"chatcmpl-1": None}, "for chatcmpl-1, expected a finite float"),
        ({1: 1.0}, "the key 1, expected ids"),
        (1e39, "expected a finite float"),  # too large to be stored
        (-1e39, "expected a finite float"),
        (10**400, "expected a finite float"),
        (np.ones(2), "(ndarray), expected a finite float"),
        ("x" * 10_000, "(str), expected a finite float"),
    ],
)
def test_anything_else_is_refused_with_what_was_returned(returned: object, said: str) -> None:
    with pytest.raises(AgentError) as caught:
        parse_agent_rewards(returned)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400  # long ones are cut short
