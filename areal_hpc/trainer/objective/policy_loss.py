"""The clipped policy gradient with a decoupled behavior weight (arXiv:2505.24298, eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.importance_sampling import TokenRows, correct_off_policy

LOSS_SUMS = ("loss", "clipped", "outside", "weight", "applied", "applied_squared", "kl")
"""Sums of a loss over tokens, besides their number."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The loss of some sampled tokens and what shaped it. All tensors are scalars."""

    total: torch.Tensor
    """Sum over tokens; divided by the batch's sampled tokens elsewhere. Carries the gradient."""
    clipped: torch.Tensor
    """Tokens whose gradient the clip removed."""
    outside: torch.Tensor
    """Tokens whose behavior weight was out of bounds: clamped or masked."""
    weight: torch.Tensor
    """Sum of the behavior weights before the bounds."""
    weight_max: torch.Tensor
    """The largest of them; 0 without tokens."""
    applied: torch.Tensor
    """Sum of the behavior weights that the terms were multiplied by."""
    applied_squared: torch.Tensor
    """Sum of their squares."""
    kl: torch.Tensor
    """Sum of the tokens' divergence of the proximal from the behavior policy."""

    def measured(self) -> tuple[dict[str, float], float]:
        """The sums by name (`SUMS`), and the largest weight; one copy from the device."""
        tensors = (self.total, self.clipped, self.outside, self.weight, self.applied,
                   self.applied_squared, self.kl, self.weight_max)  # fmt: skip
        *sums, top = torch.stack([tensor.detach().double() for tensor in tensors]).tolist()
        return dict(zip(LOSS_SUMS, sums, strict=True)), top


def compute_policy_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    behavior_N: torch.Tensor,
    advantages_N: torch.Tensor,
    rows: TokenRows,
    config: ObjectiveConfig,
) -> PolicyLoss:
    """`-sum_n w_n min(r_n A_n, clip(r_n) A_n)`, r = pi/pi_proximal, w = pi_proximal/pi_behavior.

    Args:
        logprobs_N: Log-probabilities under the weights being trained; the gradient flows here.
        proximal_N: Under the proximal policy: `proximal_logprobs`, or recomputed.
        behavior_N: As the engine reported them when it sampled.
        advantages_N: Advantage of each token's row.
        rows: The row of each token.
        config: Clip range and bounds of w.
    """
    proximal_N = proximal_N.detach()
    correction = correct_off_policy(proximal_N, behavior_N, rows, config)
    ratio_N = (logprobs_N - proximal_N).exp()
    free_N = ratio_N * advantages_N
    bound_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
    gain_N = torch.minimum(free_N, bound_N) * correction.weight_N
    raw_N = correction.raw_N
    return PolicyLoss(
        total=-gain_N.sum(),
        clipped=(bound_N < free_N).sum(),
        outside=correction.outside_N.sum(),
        weight=raw_N.sum(),
        weight_max=raw_N.max() if raw_N.numel() else raw_N.new_zeros(()),
        applied=correction.weight_N.sum(),
        applied_squared=correction.weight_N.square().sum(),
        kl=correction.kl_N.sum(),
    )


def interpolate_logprobs(
    held_N: torch.Tensor, behavior_N: torch.Tensor, age_N: torch.Tensor, taken: float
) -> torch.Tensor:
    """Proximal log-probabilities on the straight line from the behavior's to those held now.

    The policies are taken to move evenly, one version a step. A token sampled `age` versions
    before the step began, scored when the share `taken` of the step's updates has been made, has
    its proximal policy at age / (age + taken) of the way. That is exact at both ends: before the
    first update the weights held are the proximal ones, and a token of age 0 was sampled by them.
    AReaL's log-linear approximation is this formula with `taken` 1 throughout.

    Args:
        held_N: Log-probabilities under the weights held now.
        behavior_N: As the engine reported them when it sampled.
        age_N: Staleness of each token when the step began.
        taken: Updates made so far as a share of the step's.
    """
    if taken == 0:
        return held_N
    return torch.lerp(behavior_N, held_N, age_N / (age_N + taken))
