"""Weights for tokens that other weights sampled than those an update starts from.

The importance weight of a token is w = pi_proximal / pi_behavior. It corrects for the token alone:
not for what other weights would have said before and after it, so even unbounded it is biased, and
then it varies without bounds too. `trainer.objective.off_policy_correction` says what is done about
large and small ones.
When weights are clamped it is called truncated importance sampling (TIS,
fengyao.notion.site/off-policy-rl), when tokens outside two bounds are masked IcePop
(arXiv:2510.18855, section 2.3.2), when whole rows are, rejection.
docs/objectives.md lists the settings, and AReaL's names for them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from areal_hpc.recipe.sections.trainer import CorrectionAggregate, ObjectiveConfig


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group, whose gradient is the sum of its ranks' gradients. A collective."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRowMap:
    """Which row each scored token of a micro-batch belongs to. N: tokens on this rank."""

    row_N: torch.Tensor
    """Number of the row within the micro-batch."""
    row_count: int
    """Rows of the micro-batch."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold parts of the same rows; None when each row is whole here."""

    def compute_row_means(self, values_N: torch.Tensor) -> torch.Tensor:
        """The mean over the row's scored tokens, at each of them [N]. A collective of `group`.

        A gradient flows to all tokens of the row; then the backward pass is a collective too.
        """
        ones_N = torch.ones_like(values_N)
        sums_2R = values_N.new_zeros((2, self.row_count), dtype=torch.float64)
        sums_2R = sums_2R.index_add(1, self.row_N, torch.stack([values_N, ones_N]).double())
        if self.group is not None and self.group.size() > 1:
            sums_2R = _SumOverRanks.apply(sums_2R, self.group)  # type: ignore[no-untyped-call]
        return (sums_2R[0] / sums_2R[1].clamp(min=1))[self.row_N].to(values_N.dtype)

    def aggregate_rows_at_tokens(
        self, values_N: torch.Tensor, aggregate: CorrectionAggregate
    ) -> torch.Tensor:
        """The mean, sum or largest of the row's tokens, at each of them [N].

        Of values without a gradient. A collective of `group`. What is not a number stays to be
        seen in its whole row.
        """
        if aggregate == "mean":
            return self.compute_row_means(values_N)
        sums_R = self._reduce(values_N, "sum", 0.0)
        if aggregate == "sum":
            return sums_R[self.row_N].to(values_N.dtype)
        largest_R = self._reduce(values_N, "amax", -torch.inf)
        # A maximum over ranks may pass over what is not a number; a sum does not.
        largest_R = largest_R.masked_fill(sums_R.isnan(), torch.nan)
        return largest_R[self.row_N].to(values_N.dtype)

    def _reduce(
        self, values_N: torch.Tensor, aggregate: Literal["sum", "amax"], start: float
    ) -> torch.Tensor:
        found_R = values_N.new_full((self.row_count,), start, dtype=torch.float64)
        found_R = found_R.scatter_reduce(0, self.row_N, values_N.detach().double(), aggregate)
        if self.group is not None and self.group.size() > 1:
            op = dist.ReduceOp.SUM if aggregate == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(found_R, op=op, group=self.group)
        return found_R


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


def compute_importance_weights(
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
    by_row, metric = (
        config.off_policy_correction_level == "sequence",
        config.off_policy_correction_metric,
    )
    judged_N = {"kl": kl_N, "k2": log_ratio_N.square() / 2}.get(metric, log_ratio_N)
    if by_row:
        judged_N = rows.aggregate_rows_at_tokens(judged_N, config.off_policy_correction_agg)
    if metric == "ratio":
        judged_N = judged_N.exp()
        raw_N = rows.compute_row_means(log_ratio_N).exp() if by_row else raw_N
    low, high = config.off_policy_correction_low, config.off_policy_correction_high
    # 0 is no lower bound: of k1 alone there is something below it.
    outside_N = (judged_N < (low or -torch.inf)) | (judged_N > high)
    held_N = raw_N.clamp(low, high) if config.off_policy_correction == "clamp" else 0.0
    return ImportanceWeights(torch.where(outside_N, held_N, raw_N), raw_N, outside_N, kl_N)
