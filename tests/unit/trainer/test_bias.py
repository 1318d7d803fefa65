"""What measures the bias of an objective can tell; `tests/acceptance/test_bias.py` has them all."""

from tests.support.bias_scenarios import SCENARIOS, measure

BRANCHES = list(SCENARIOS)[4]


def test_an_objective_without_a_scale_follows_the_true_gradient() -> None:
    cosine, ratio = measure("graded rewards (lognormal)", "rloo", 1)
    assert cosine >= 1 - 1e-9
    assert abs(ratio - 1.0) < 1e-6


def test_credit_of_turns_is_exact_on_branches() -> None:
    assert measure(BRANCHES, "rloo, credit=turn", 2)[0] >= 1 - 1e-9


def test_a_known_bias_is_seen() -> None:
    assert measure("graded rewards (lognormal)", "default", 1)[0] < 0.95
