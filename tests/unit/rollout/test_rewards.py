"""Rewards that agents may return, the limits of episodes, and refusals."""

import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc
from areal_hpc.errors import AgentError, InvalidRewardError, RecipeError
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.rollout.driver import LeasedTickets
from areal_hpc.rollout.episodes.episode import parse_agent_rewards
from areal_hpc.rollout.episodes.episode_spec import EpisodeLimits, check_task_limits, resolve_limits
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import TicketGrant, TicketRef


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_finite_float_goes_to_the_last_interaction(reward: float) -> None:
    assert parse_agent_rewards(reward) == {None: Reward(reward)}


@pytest.mark.parametrize(
    "reward", [1, True, False, np.float32(0.5), np.int64(2), np.bool_(True), np.array(3.0)]
)
def test_other_real_numbers_become_floats(reward: Any) -> None:
    (parsed,) = parse_agent_rewards(reward).values()
    assert type(parsed.value) is float
    assert parsed.value == reward


@given(st.dictionaries(st.text(), st.floats(-1e6, 1e6), min_size=1))
def test_dict_gives_every_interaction_its_reward(rewards: dict[str, float]) -> None:
    assert parse_agent_rewards(rewards) == {name: Reward(value) for name, value in rewards.items()}


@pytest.mark.parametrize(
    ("returned", "text"),
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
def test_anything_else_is_refused_with_what_was_returned(returned: object, text: str) -> None:
    with pytest.raises(AgentError) as caught:
        parse_agent_rewards(returned)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400  # long ones are cut short


ROLLOUT = RolloutConfig.model_validate({"limits": {"max_turns": 8}, "episode_timeout_s": 60.0})


def test_the_recipe_limits_an_episode_and_a_task_overrides_what_it_names() -> None:
    limits = resolve_limits(ROLLOUT, {"question": "2+2"})
    assert limits == EpisodeLimits(max_turns=8, max_tokens=0, timeout_s=60.0)
    overridden = resolve_limits(ROLLOUT, {"limits": {"max_tokens": 100, "timeout_s": 5}})
    assert overridden == EpisodeLimits(max_turns=8, max_tokens=100, timeout_s=5.0)


@pytest.mark.parametrize("limits", [3, {"max_turn": 1}, {"max_turns": -1}, {"timeout_s": 0}])
def test_limits_of_a_task_that_cannot_be_read_are_refused_before_any_episode(limits: Any) -> None:
    message = r"(?s)cannot be read.*give any of max_turns, max_tokens, timeout_s"
    with pytest.raises(RecipeError, match=message):
        check_task_limits(ROLLOUT, 3600.0, {"limits": limits})


def test_limits_that_the_session_cannot_keep_are_refused_and_others_let_through() -> None:
    message = "session_timeout_s=3600 is less than the 3900 s that 3 tries"
    with pytest.raises(RecipeError, match=message):
        check_task_limits(ROLLOUT, 3600.0, {"limits": {"timeout_s": 1300}})
    check_task_limits(ROLLOUT, 3600.0, {"limits": {"timeout_s": 1200}})
    check_task_limits(ROLLOUT, 1.0, {"question": "2+2"})


def grant(ticket_id: int, n_samples: int = 4) -> TicketGrant:
    return TicketGrant(TicketRef(ticket_id, 0), ticket_id, 0, n_samples)


def test_repeated_grant_is_run_once_but_a_dropped_ticket_is_forgotten() -> None:
    board = LeasedTickets(8, 4)
    for ticket, is_finished in ((grant(1), True), (grant(2), False)):
        assert board.hold(ticket)
        assert not board.hold(ticket)
        board.release(ticket.ref, is_finished=is_finished)
    assert not board.hold(grant(1))
    assert (board.held, board.finished, board.free_episode_slots) == ([], [grant(1).ref], 8)
    assert board.hold(grant(2))


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
    ("value", "more", "text"),
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
def test_wrong_rewards_are_refused_when_made(value: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRewardError) as caught:
        Reward(value, **more)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400
