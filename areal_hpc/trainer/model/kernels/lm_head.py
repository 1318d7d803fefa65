"""Logits in float32 from states and weights of bfloat16.

Logits that are rounded to bfloat16 move log-probabilities by .04 to .2 nat. Products of two
bfloat16 numbers are exact in float32, so what is left is the rounding of float32 sums.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

VOCAB_BLOCK_COLUMNS = 16384
"""Columns of the vocabulary whose gradient, or weights in float32, exist at a time."""


def compute_float32_logits(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, operands: torch.dtype
) -> torch.Tensor:
    """States times weights, added up and kept in float32 [N, V], as their gradients are.

    Both, and in the backward pass the gradient of the logits, enter the products in the dtype
    `operands`: float32, or bfloat16 for the GPU's matrix units.
    """
    logits_NV: torch.Tensor = _Float32Logits.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, operands
    )
    return logits_NV


class _Float32Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, operands: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH)
        ctx.operands = operands
        hidden_NH = hidden_NH.to(operands)
        if weight_VH.dtype == operands and weight_VH.is_cuda:
            return _matmul_to_float32(hidden_NH, weight_VH.T)
        shape = len(hidden_NH), len(weight_VH)
        logits_NV = hidden_NH.new_empty(shape, dtype=torch.float32)
        for block in _iterate_blocks(weight_VH):
            logits_NV[:, block] = _matmul_to_float32(hidden_NH, weight_VH[block].to(operands).T)
        return logits_NV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden_NH, weight_VH = ctx.saved_tensors
        states_NH = hidden_NH.to(ctx.operands)
        by_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        by_weight_VH = torch.empty_like(weight_VH)
        for block in _iterate_blocks(weight_VH):
            gradient = gradient_NV[:, block].to(ctx.operands)
            by_hidden_NH += _matmul_to_float32(gradient, weight_VH[block].to(ctx.operands))
            by_weight_VH[block] = _matmul_to_float32(gradient.T, states_NH)
        return by_hidden_NH.to(hidden_NH.dtype), by_weight_VH, None


def _matmul_to_float32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _iterate_blocks(weight_VH: torch.Tensor) -> Iterator[slice]:
    for begin in range(0, len(weight_VH), VOCAB_BLOCK_COLUMNS):
        yield slice(begin, begin + VOCAB_BLOCK_COLUMNS)
