import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.importance_sampling import TokenRowMap
from areal_hpc.trainer.objective.policy_loss import compute_policy_loss, interpolate_logprobs

CONFIG = ObjectiveConfig(
    clip_low=0.2, clip_high=0.28, off_policy_correction="clamp", off_policy_correction_high=5.0
)


def rows(tokens: int) -> TokenRowMap:
    """All tokens in one row."""
    return TokenRowMap(torch.zeros(tokens, dtype=torch.long), 1)


def gradient(
    logprob: float, proximal: float, behavior: float, advantage: float
) -> tuple[float, bool]:
    """d loss / d logprob of one token, and whether the clip acted."""
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    others = torch.tensor([[proximal], [behavior], [advantage]], dtype=torch.float64)
    total, sums, _ = compute_policy_loss(logprobs, others[0], others[1], others[2], rows(1), CONFIG)
    total.backward()
    assert logprobs.grad is not None
    return logprobs.grad.item(), bool(sums["clipped"])


def test_on_policy_the_gradient_is_the_negative_advantage() -> None:
    value, clipped = gradient(-1.0, -1.0, -1.0, 2.5)
    assert value == pytest.approx(-2.5)
    assert not clipped


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "is_clipped"),
    [
        (0.3, 1.0, True),  # already much likelier, and good: enough
        (0.3, -1.0, False),  # much likelier, and bad: must come down
        (-0.3, -1.0, True),  # already much less likely, and bad: enough
        (-0.3, 1.0, False),
        (0.2, 1.0, False),  # exp(0.2) < 1.28: inside the clip
    ],
)
def test_clipping_removes_gradients(log_ratio: float, advantage: float, is_clipped: bool) -> None:
    value, clipped = gradient(-1.0 + log_ratio, -1.0, -1.0, advantage)
    assert clipped is is_clipped
    assert (value == 0.0) is is_clipped


def test_tokens_sampled_by_older_weights_are_reweighted_up_to_the_cap() -> None:
    assert gradient(-1.0, -1.0, -2.0, 1.0)[0] == pytest.approx(-2.718281828)
    assert gradient(-1.0, -1.0, -9.0, 1.0)[0] == pytest.approx(-5.0)


def test_no_tokens_give_a_loss_of_zero() -> None:
    empty = torch.zeros(0, requires_grad=True)
    _, sums, weight_max = compute_policy_loss(empty, empty, empty, empty, rows(0), CONFIG)
    assert {float(value) for value in sums.values()} == {0.0}
    assert weight_max == 0.0


LOGPROB = st.floats(-5.0, 0.0)


@given(LOGPROB, LOGPROB, LOGPROB, st.floats(-3.0, 3.0))
def test_the_gradient_never_points_against_the_advantage(
    logprob: float, proximal: float, behavior: float, advantage: float
) -> None:
    value, _ = gradient(logprob, proximal, behavior, advantage)
    assert value * advantage <= 0.0


@given(st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB, st.floats(-3.0, 3.0)), max_size=8))
def test_loss_and_gradient_equal_a_loop(tokens: list[tuple[float, float, float, float]]) -> None:
    config = ObjectiveConfig(
        off_policy_correction="mask", off_policy_correction_low=0.5, off_policy_correction_high=2.0
    )
    total, clipped, slopes = 0.0, 0, []
    for logprob, proximal, behavior, advantage in tokens:
        ratio, weight = np.exp(logprob - proximal), np.exp(proximal - behavior)
        kept = weight if 0.5 <= weight <= 2.0 else 0.0
        free = ratio * advantage
        bound = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage
        total -= kept * min(free, bound)
        clipped += bound < free
        slopes.append(0.0 if bound < free else -kept * free)
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 4).T.contiguous()
    logprobs = columns[0].clone().requires_grad_()
    loss, sums, _ = compute_policy_loss(
        logprobs, columns[1], columns[2], columns[3], rows(len(tokens)), config
    )
    loss.backward()
    assert sums["loss"] == loss.item() == pytest.approx(total, abs=1e-9)
    assert sums["clipped"] == clipped
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad, slopes, rtol=1e-9, atol=1e-12)


def test_without_correction_the_proximal_policy_alone_counts() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    config = ObjectiveConfig(off_policy_correction="none")
    loss, sums, _ = compute_policy_loss(
        logprobs, torch.tensor([-1.0]), torch.tensor([-9.0]), torch.tensor([1.0]), rows(1), config
    )
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == -1.0
    assert sums["applied"] == 1.0


def test_the_log_linear_estimate_is_exact_at_both_ends() -> None:
    held, behavior = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0])
    ages = torch.tensor([0.0, 1.0, 3.0])
    assert interpolate_logprobs(held, behavior, ages, 0.0) is held
    # Half a step on: a fresh token's proximal policy is the one that sampled it; the others' are
    # 1 / 1.5 and 3 / 3.5 of the way.
    found = interpolate_logprobs(held, behavior, ages, 0.5)
    np.testing.assert_allclose(found, [-3.0, -3 + 2 / 1.5, -3 + 2 * 3 / 3.5], rtol=1e-6)


def test_with_a_whole_step_taken_the_estimate_is_areals() -> None:
    """`areal/trainer/ppo/actor.py`: alpha = (v - 1 - v_behave) / (v - v_behave)."""
    held, behavior = torch.tensor([-1.5, -2.2]), torch.tensor([-1.0, -2.0])
    # Sampled by 0 and 2, trained as version 4: the proximal one is 3, of ages 3 and 1.
    found = interpolate_logprobs(held, behavior, torch.tensor([3.0, 1.0]), 1.0)
    np.testing.assert_allclose(found, [-1.375, -2.1], rtol=1e-6)
