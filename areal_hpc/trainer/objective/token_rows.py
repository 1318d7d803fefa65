"""Scored tokens by row: means, sums and maxima over the tokens of each."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from areal_hpc.recipe.sections.objective import CorrectionAggregate


class _SumOverRanks(torch.autograd.Function):
    """Sum over a group, whose gradient is the sum of its ranks' gradients. A collective."""

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
    """Map from scored tokens of a micro-batch to their rows. N: tokens on this rank."""

    row_N: torch.Tensor
    """Index of the row within the micro-batch."""
    row_count: int
    """Number of rows in the micro-batch."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold parts of the same rows; None when each row is whole here."""

    def compute_row_means(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the mean over the row's scored tokens at each [N]. A collective of `group`.

        Gradients flow to all tokens of the row; then the backward pass is a collective too.
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
        """Return the mean, sum or maximum over the row's tokens, at each of them [N].

        Values have no gradient. A collective of `group`. A value that is not a number makes the
        result of its whole row not a number.
        """
        if aggregate == "mean":
            return self.compute_row_means(values_N)
        sums_R = self._reduce(values_N, "sum", 0.0)
        if aggregate == "sum":
            return sums_R[self.row_N].to(values_N.dtype)
        largest_R = self._reduce(values_N, "amax", -torch.inf)
        # A maximum over ranks may ignore values that are not numbers; a sum does not.
        largest_R = largest_R.masked_fill(sums_R.isnan(), torch.nan)
        return largest_R[self.row_N].to(values_N.dtype)

    def _reduce(
        self, values_N: torch.Tensor, aggregate: Literal["sum", "amax"], start: float
    ) -> torch.Tensor:
        result_R = values_N.new_full((self.row_count,), start, dtype=torch.float64)
        result_R = result_R.scatter_reduce(0, self.row_N, values_N.detach().double(), aggregate)
        if self.group is not None and self.group.size() > 1:
            op = dist.ReduceOp.SUM if aggregate == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(result_R, op=op, group=self.group)
        return result_R
