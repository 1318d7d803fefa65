"""The gated activation of the MLP in one step that keeps nothing but its input.

Megatron's own, without a compiled fusion, keeps two more activations of the MLP's width for the
backward pass and joins the gradients of gate and up projection by a copy.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable

from areal_hpc.trainer.model.kernels.rms_norm import iterate_row_chunks


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 F], gate and up side by side: [..., F]."""
    *rows, width = gate_up.shape
    product = _SwiGLU.apply(gate_up.reshape(-1, width))  # type: ignore[no-untyped-call]
    return product.view(*rows, width // 2)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        product = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for rows in iterate_row_chunks(gate_up):
            torch.mul(F.silu(gate[rows]), up[rows], out=product[rows])
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        joined = torch.empty_like(gate_up)
        of_gate, of_up = joined.chunk(2, -1)
        for rows in iterate_row_chunks(gate_up):
            torch.mul(gradient[rows], F.silu(gate[rows]), out=of_up[rows])
            torch.ops.aten.silu_backward.grad_input(
                gradient[rows] * up[rows], gate[rows], grad_input=of_gate[rows]
            )
        return joined
