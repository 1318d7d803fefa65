"""Weights for tokens that other weights sampled than those an update starts from.

The importance weight of a token is w = pi_proximal / pi_behavior. It corrects for the token alone:
not for what other weights would have said before and after it, so even unbounded it is biased, and
then it varies without bounds too. `trainer.objective.off_policy_correction` says what is done about
large and small ones.
When weights are clamped it is called truncated importance sampling (TIS,
fengyao.notion.site/off-policy-rl), when tokens outside two bounds are masked IcePop
(arXiv:2510.18855), when whole rows are, rejection.
docs/objectives.md lists the settings, and AReaL's names for them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from areal_hpc.recipe.sections.trainer import ObjectiveConfig


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group, whose gradient is the sum of its ranks' gradients. A collective."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sum on every rank."""
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Each rank's loss depends on the sum."""
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRowMap:
    """Which row each scored token of a micro-batch belongs to. N: tokens on this rank."""

    row_N: torch.Tensor
    """Number of the row within the micro-batch."""
    count: int
    """Rows of the micro-batch."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold parts of the same rows; None when each row is whole here."""

    def compute_row_means(self, values_N: torch.Tensor) -> torch.Tensor:
        """The mean over the row's scored tokens, at each of them [N]. A collective of `group`.

        A gradient flows to all tokens of the row; then the backward pass is a collective too.
        """
        ones_N = torch.ones_like(values_N)
        sums_2R = values_N.new_zeros((2, self.count), dtype=torch.float64)
        sums_2R = sums_2R.index_add(1, self.row_N, torch.stack([values_N, ones_N]).double())
        if self.group is not None and self.group.size() > 1:
            sums_2R = _SumOverRanks.apply(sums_2R, self.group)  # type: ignore[no-untyped-call]
        return (sums_2R[0] / sums_2R[1].clamp(min=1))[self.row_N].to(values_N.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeights:
    """Behavior weights of some tokens after the correction. No gradient flows through any of it."""

    weight_N: torch.Tensor
    """Factor of each token's term of the objective; 0 where it is masked."""
    raw_N: torch.Tensor
    """The importance weight before the bounds: the token's, or the geometric mean of its row."""
    outside_N: torch.Tensor
    """Tokens whose weight or divergence was out of bounds: clamped or masked."""
    kl_N: torch.Tensor
    """An estimate of KL(behavior || proximal), never negative: k3 of joschu.net/blog/kl-approx."""


def correct_off_policy(
    proximal_N: torch.Tensor, behavior_N: torch.Tensor, rows: TokenRowMap, config: ObjectiveConfig
) -> ImportanceWeights:
    """Weigh tokens as the objective asks. A collective of `rows.group` at level `sequence`.

    What is not a number is never out of bounds: it reaches the loss, where it is noticed.
    """
    log_ratio_N = (proximal_N - behavior_N).detach()
    raw_N = log_ratio_N.exp()
    kl_N = (torch.expm1(log_ratio_N) - log_ratio_N).clamp(min=0)
    if config.off_policy_correction == "none":
        return ImportanceWeights(torch.ones_like(raw_N), raw_N, torch.zeros_like(raw_N) != 0, kl_N)
    by_row = config.off_policy_correction_level == "sequence"
    if config.off_policy_correction_metric == "kl":
        judged_N = rows.compute_row_means(kl_N) if by_row else kl_N
    else:
        judged_N = raw_N = rows.compute_row_means(log_ratio_N).exp() if by_row else raw_N
    low, high = config.off_policy_correction_low, config.off_policy_correction_high
    outside_N = (judged_N < low) | (judged_N > high)
    if config.off_policy_correction == "mask":
        return ImportanceWeights(torch.where(outside_N, 0.0, raw_N), raw_N, outside_N, kl_N)
    return ImportanceWeights(raw_N.clamp(low, high), raw_N, outside_N, kl_N)
