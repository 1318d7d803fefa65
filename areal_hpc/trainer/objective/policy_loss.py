"""The clipped policy gradient with a decoupled behavior weight (arXiv:2505.24298, eq. 5)."""

from collections.abc import Mapping

import torch

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.importance_sampling import TokenRowMap, correct_off_policy

LOSS_SUM_NAMES = ("loss", "clipped", "outside", "weight", "applied", "applied_squared", "kl")
"""Sums of a loss over tokens, besides their number: `clipped` counts tokens whose gradient the clip
removed, `outside` those whose behavior weight was out of bounds; `weight` adds up behavior weights
before the bounds, `applied` and its squares those that terms were multiplied by, `kl` the
divergence of the proximal from the behavior policy."""


def compute_policy_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    behavior_N: torch.Tensor,
    advantages_N: torch.Tensor,
    rows: TokenRowMap,
    config: ObjectiveConfig,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor], torch.Tensor]:
    """`-sum_n w_n min(r_n A_n, clip(r_n) A_n)`, r = pi/pi_proximal, w = pi_proximal/pi_behavior.

    The gradient flows through `logprobs_N`, those of the weights being trained.

    Returns:
        The sum, to be divided by the batch's sampled tokens; `LOSS_SUM_NAMES` by name; the
        largest w before the bounds, 0 without tokens. All stay on the device, which nothing waits
        for.
    """
    proximal_N = proximal_N.detach()
    correction = correct_off_policy(proximal_N, behavior_N, rows, config)
    raw_N, weight_N = correction.raw_N, correction.weight_N
    ratio_N = (logprobs_N - proximal_N).exp()
    free_N = ratio_N * advantages_N
    bound_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
    total = -(torch.minimum(free_N, bound_N) * weight_N).sum()
    measured = (
        total.detach(),
        (bound_N < free_N).sum(),
        correction.outside_N.sum(),
        raw_N.sum(),
        weight_N.sum(),
        weight_N.square().sum(),
        correction.kl_N.sum(),
    )
    sums = dict(zip(LOSS_SUM_NAMES, (one.double() for one in measured), strict=True))
    return total, sums, raw_N.max() if raw_N.numel() else raw_N.new_zeros(())


def interpolate_logprobs(
    held_N: torch.Tensor, behavior_N: torch.Tensor, age_N: torch.Tensor, taken: float
) -> torch.Tensor:
    """Proximal log-probabilities on the straight line from the behavior's to those held now.

    The policies are taken to move evenly, one version a step. A token sampled `age` versions
    before the step began, scored when the share `taken` of the step's updates has been made, has
    its proximal policy at age / (age + taken) of the way. That is exact at both ends: before the
    first update the weights held are the proximal ones, and a token of age 0 was sampled by them.
    AReaL's log-linear approximation is this formula with `taken` 1 throughout.
    """
    if taken == 0:
        return held_N
    return torch.lerp(behavior_N, held_N, age_N / (age_N + taken))
