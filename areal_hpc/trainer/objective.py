"""The clipped policy gradient with a decoupled behaviour weight (arXiv:2505.24298, eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areal_hpc.trainer.config import ObjectiveConfig


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The loss of some sampled tokens and what shaped it. All tensors are scalars."""

    total: torch.Tensor
    """Sum over tokens; divided by the batch's sampled tokens elsewhere. Carries the gradient."""
    clipped: torch.Tensor
    """Tokens whose gradient the clip removed."""
    weight_max: torch.Tensor
    """Largest behaviour weight before the cap; 0 without tokens."""


def policy_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    behaviour_N: torch.Tensor,
    advantages_N: torch.Tensor,
    config: ObjectiveConfig,
) -> PolicyLoss:
    """`-sum_n w_n min(r_n A_n, clip(r_n) A_n)`, r = pi/pi_proximal, w = pi_proximal/pi_behaviour.

    Args:
        logprobs_N: Log-probabilities under the weights being trained; the gradient flows here.
        proximal_N: Under the weights at the start of the batch.
        behaviour_N: As the engine reported them when it sampled.
        advantages_N: Advantage of each token's row.
        config: Clip range and cap of w.
    """
    proximal_N = proximal_N.detach()
    ratio_N = (logprobs_N - proximal_N).exp()
    weight_N = (proximal_N - behaviour_N).exp()
    free_N = ratio_N * advantages_N
    bound_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
    gain_N = torch.minimum(free_N, bound_N) * weight_N.clamp(max=config.behaviour_weight_cap)
    weight_max = weight_N.max() if weight_N.numel() else weight_N.new_zeros(())
    return PolicyLoss(total=-gain_N.sum(), clipped=(bound_N < free_N).sum(), weight_max=weight_max)
