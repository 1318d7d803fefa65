"""Which objectives follow the true gradient exactly, and that what measures it can tell."""

import pytest

from tests.support.bias_gradient import measure_cosine
from tests.support.bias_scenarios import SCENARIOS, UNTAUGHT_PPO, measure, prepare

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


def test_replies_that_are_left_out_are_the_environments() -> None:
    assert measure("graded, the second turn is greedy", "rloo", 1)[0] >= 1 - 1e-9
    nucleus = "graded, the second turn has a `top_p` of .8"
    assert measure(nucleus, "rloo", 1)[0] >= 1 - 1e-9


def test_a_nucleus_that_is_recorded_is_exact() -> None:
    recorded = "graded, `top_p` .8 with `record_sampling_mask`"
    assert measure(recorded, "rloo", 1)[0] >= 1 - 1e-9


def test_failures_that_earn_something_are_learned_from() -> None:
    failures = "binary, 80 % of long episodes fail and are repeated"
    assert measure(failures, "rloo", 1)[0] < 0.95
    failures = "binary, the same, `failed_episodes={reward: 0}`"
    assert measure(failures, "rloo", 1)[0] >= 1 - 1e-9


def test_known_biases_are_seen() -> None:
    assert measure("graded rewards (lognormal)", "default", 1)[0] < 0.95
    assert measure("binary rewards", "default", 1)[0] > 0.98


def test_a_critic_that_has_learned_turns_ppo_less_than_one_that_has_not() -> None:
    learned, untaught = (measure("binary rewards", name, 1)[0] for name in ("ppo", UNTAUGHT_PPO))
    assert untaught < learned < 1 - 1e-6


def test_a_penalty_and_a_teacher_are_a_part_of_what_is_true() -> None:
    for name in ("reinforce_pp", "opd"):
        task, plain = prepare(BRANCHES, name, 1), prepare(BRANCHES, "default", 1)
        assert 1 - measure_cosine(task.truth, plain.truth) > 1e-9
