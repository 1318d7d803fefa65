"""What measures the bias of an objective can tell; `tests/acceptance/test_bias.py` has them all."""

import pytest

from tests.support.bias_scenarios import SCENARIOS, measure
from tests.support.bias_toy import AGENTS
from tests.support.thoroughness import choose

BRANCHES = list(SCENARIOS)[4]


def test_an_objective_without_a_scale_follows_the_true_gradient() -> None:
    cosine, ratio = measure("graded rewards (lognormal)", "rloo", 1)
    assert cosine >= 1 - 1e-9
    assert abs(ratio - 1.0) < 1e-6


def test_credit_of_turns_is_exact_on_branches() -> None:
    assert measure(BRANCHES, "rloo, credit=turn", 2)[0] >= 1 - 1e-9


@pytest.mark.parametrize("agent", choose(AGENTS, "a sub-agent as a tool"))
@pytest.mark.parametrize("objective", ["rloo", "rloo, credit=turn"])
def test_the_reward_of_an_episode_is_exact_whatever_its_conversations(
    agent: str, objective: str
) -> None:
    assert measure(f"{agent}, a reward of the episode", objective, 1)[0] >= 1 - 1e-9


@pytest.mark.thorough
def test_a_reward_that_names_a_reply_leaves_out_what_came_after_it() -> None:
    named, ordered = (one for one in SCENARIOS if "names" in one or "chronological" in one)
    assert measure(named, "rloo", 1)[0] < 0.95
    assert measure(ordered, "rloo", 1)[0] >= 1 - 1e-9


def test_a_known_bias_is_seen() -> None:
    assert measure("graded rewards (lognormal)", "default", 1)[0] < 0.95
