"""What the loss made of each token, beside its sums: ratio, clip, weight out of bounds."""

from dataclasses import dataclass

import torch

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.importance_sampling import TokenRowMap, compute_importance_weights
from areal_hpc.trainer.objective.policy_loss import compute_surrogate_objective


@dataclass(frozen=True, slots=True, eq=False)
class TokenMeasures:
    """Of some tokens [N]."""

    ratios_N: torch.Tensor
    """To the proximal policy; at `ratio_level=sequence` that of the row."""
    clipped_N: torch.Tensor
    """The clip acted. Never with a loss of one's own, which says itself what it clips."""
    outside_N: torch.Tensor
    """The importance weight was out of bounds."""


@torch.no_grad()
def measure_token_ratios_and_bounds(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    behavior_N: torch.Tensor,
    advantages_N: torch.Tensor,
    rows: TokenRowMap,
    config: ObjectiveConfig,
) -> TokenMeasures:
    """What `compute_policy_loss` makes of tokens. A collective where that one is."""
    outside_N = compute_importance_weights(proximal_N, behavior_N, rows, config).outside_N
    log_ratio_N = logprobs_N - proximal_N
    if config.ratio_level == "sequence":
        log_ratio_N = rows.compute_row_means(log_ratio_N)
    ratios_N = log_ratio_N.exp()
    if config.custom:
        return TokenMeasures(ratios_N, torch.zeros_like(outside_N), outside_N)
    clipped_N = compute_surrogate_objective(logprobs_N, ratios_N, advantages_N, config).clipped_N
    return TokenMeasures(ratios_N, clipped_N, outside_N)
