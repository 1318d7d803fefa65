from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.trainer.config import ObjectiveConfig
from areal_hpc.trainer.objective import policy_loss

CONFIG = ObjectiveConfig(clip_low=0.2, clip_high=0.28, behaviour_weight_cap=5.0)


def gradient(
    logprob: float, proximal: float, behaviour: float, advantage: float
) -> tuple[float, bool]:
    """d loss / d logprob of one token, and whether the clip acted."""
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    others = (torch.tensor([value], dtype=torch.float64) for value in (proximal, behaviour))
    loss = policy_loss(logprobs, *others, torch.tensor([advantage], dtype=torch.float64), CONFIG)
    loss.total.backward()
    assert logprobs.grad is not None
    return logprobs.grad.item(), bool(loss.clipped)


def test_on_policy_the_gradient_is_the_negative_advantage() -> None:
    assert gradient(-1.0, -1.0, -1.0, 2.5) == (pytest.approx(-2.5), False)


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
def test_the_clip_removes_gradients_that_would_go_further(
    log_ratio: float, advantage: float, is_clipped: bool
) -> None:
    value, clipped = gradient(-1.0 + log_ratio, -1.0, -1.0, advantage)
    assert clipped is is_clipped
    assert (value == 0.0) is is_clipped


def test_tokens_sampled_by_older_weights_are_reweighted_up_to_the_cap() -> None:
    assert gradient(-1.0, -1.0, -2.0, 1.0)[0] == pytest.approx(-2.718281828)
    assert gradient(-1.0, -1.0, -9.0, 1.0)[0] == pytest.approx(-5.0)


def test_no_tokens_give_a_loss_of_zero() -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss = policy_loss(empty, empty, empty, empty, CONFIG)
    assert loss.total.item() == 0.0
    assert loss.weight_max.item() == 0.0


LOGPROB = st.floats(-5.0, 0.0)


@given(LOGPROB, LOGPROB, LOGPROB, st.floats(-3.0, 3.0))
def test_the_gradient_never_points_against_the_advantage(
    logprob: float, proximal: float, behaviour: float, advantage: float
) -> None:
    value, _ = gradient(logprob, proximal, behaviour, advantage)
    assert value * advantage <= 0.0
