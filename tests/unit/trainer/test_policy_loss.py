import numpy as np
import torch

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.importance_sampling import TokenRowMap
from areal_hpc.trainer.objective.policy_loss import compute_policy_loss, interpolate_logprobs

CONFIG = ObjectiveConfig(
    clip_low=0.2, clip_high=0.28, off_policy_correction="clamp", off_policy_correction_high=5.0
)


def rows(tokens: int) -> TokenRowMap:
    """All tokens in one row."""
    return TokenRowMap(torch.zeros(tokens, dtype=torch.long), 1)


def test_no_tokens_give_a_loss_of_zero() -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss = compute_policy_loss(empty, empty, empty, empty, rows(0), CONFIG)
    assert {float(value) for value in loss.sums.values()} == {0.0}
    assert loss.largest_weight == 0.0


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
