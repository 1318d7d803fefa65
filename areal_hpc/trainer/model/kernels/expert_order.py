"""Order in which tokens reach the experts they visit, the same at every run.

Rows are sorted by expert and, within one, by token. The way there and back, and their gradients,
are gathers and sums over the experts of a token: Megatron's own adds rows up by atomic operations,
whose order on a GPU, and so the last bits of the result, differ from run to run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, eq=False)
class ExpertOrder:
    """T: tokens, K: experts that each visits, R = T K: rows, one per visit."""

    visits_R: torch.Tensor
    """The visit, token * K + number of the expert among the token's, of each row."""
    rows_TK: torch.Tensor
    """The row of each visit."""
    experts_TK: torch.Tensor
    """The experts of each token, ascending."""

    def spread(self, tokens_TH: torch.Tensor) -> torch.Tensor:
        """Each token's states once for each of its experts [R, H]."""
        return _SpreadTokens.apply(tokens_TH, self.visits_R, self.rows_TK)  # type: ignore[no-any-return, no-untyped-call]

    def sum_rows_per_token(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """The sum of each token's rows [T, H]."""
        return _CollectTokens.apply(rows_RH, self.visits_R, self.rows_TK)  # type: ignore[no-any-return, no-untyped-call]

    def pick_weights(self, weights_TE: torch.Tensor) -> torch.Tensor:
        """The weight of each row, from those of all experts for each token [R]."""
        return weights_TE.gather(1, self.experts_TK).flatten()[self.visits_R]


def plan_expert_order(is_visited_TE: torch.Tensor, per_token: int) -> ExpertOrder:
    """The order for a routing in which every token visits `per_token` experts. Reads nothing back.

    Both sorts are stable: equal keys keep their order on every device.
    """
    by_visit_TE = is_visited_TE.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    experts_TK = by_visit_TE[:, :per_token].contiguous()
    visits_R = experts_TK.flatten().argsort(stable=True)
    numbers_R = torch.arange(len(visits_R), device=visits_R.device)
    rows_R = torch.empty_like(visits_R).scatter_(0, visits_R, numbers_R)
    return ExpertOrder(visits_R, rows_R.view_as(experts_TK), experts_TK)


class _SpreadTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_TH: torch.Tensor, visits_R: torch.Tensor, rows_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_TK)
        return tokens_TH.index_select(0, visits_R // rows_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows_TK,) = ctx.saved_tensors
        return _sum_rows_of_each_token(gradient_RH, rows_TK), None, None


class _CollectTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RH: torch.Tensor, visits_R: torch.Tensor, rows_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(visits_R)
        ctx.per_token = rows_TK.shape[1]
        return _sum_rows_of_each_token(rows_RH, rows_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (visits_R,) = ctx.saved_tensors
        return gradient_TH.index_select(0, visits_R // ctx.per_token), None, None


def _sum_rows_of_each_token(rows_RH: torch.Tensor, rows_TK: torch.Tensor) -> torch.Tensor:
    visits_RH = rows_RH.index_select(0, rows_TK.flatten())
    return visits_RH.view(*rows_TK.shape, rows_RH.shape[1]).sum(1)
