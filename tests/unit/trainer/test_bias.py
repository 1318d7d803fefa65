"""Which objectives follow the true gradient exactly, and that what measures it can tell."""

import pytest

from tests.support.bias_scenarios import SCENARIOS, measure

REWARDS = list(SCENARIOS)[:4]
BRANCHES = list(SCENARIOS)[4]


@pytest.mark.parametrize("scenario", REWARDS)
@pytest.mark.parametrize("name", ["rloo", "reinforce", "group_mean, none, sums"])
def test_objectives_without_a_scale_are_exact(scenario: str, name: str) -> None:
    cosine, ratio = measure(scenario, name, 1)
    assert cosine >= 1 - 1e-9
    assert ratio == pytest.approx(0.5 if name.startswith("group_mean") else 1.0, rel=1e-6)


@pytest.mark.parametrize("scenario", ["a reward for each turn", BRANCHES])
@pytest.mark.parametrize("name", ["rloo, credit=turn", "reinforce, credit=turn"])
def test_credit_of_turns_is_exact_on_conversations_and_branches(scenario: str, name: str) -> None:
    assert measure(scenario, name, 2)[0] >= 1 - 1e-9


def test_credit_of_episodes_is_exact_on_branches() -> None:
    assert measure(BRANCHES, "rloo", 3)[0] >= 1 - 1e-9


def test_a_greedy_turn_is_the_environments_and_failures_that_earn_something_are_learned_from() -> (
    None
):
    assert measure("graded, the second turn is greedy", "rloo", 1)[0] >= 1 - 1e-9
    failures = "binary, 80 % of long episodes fail and are repeated"
    assert measure(failures, "rloo", 1)[0] < 0.95
    failures = "binary, the same, `failed_episodes={reward: 0}`"
    assert measure(failures, "rloo", 1)[0] >= 1 - 1e-9


def test_known_biases_are_seen() -> None:
    assert measure("graded rewards (lognormal)", "default", 1)[0] < 0.95
    assert measure("binary rewards", "default", 1)[0] > 0.98
