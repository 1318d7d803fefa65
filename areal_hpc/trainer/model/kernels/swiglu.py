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
    *rows, width = gate_up.shape
    product = _SwiGLU.apply(gate_up.reshape(-1, width), None)  # type: ignore[no-untyped-call]
    return product.view(*rows, width // 2)  # type: ignore[no-any-return]


def weighted_swiglu(gate_up_RG: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [R, 2 F], each row times its float32 weight, in the type of the rows.

    Rounded before the weight and after it, as Megatron's loop over experts rounds.
    """
    return _SwiGLU.apply(gate_up_RG, weights_R)  # type: ignore[no-any-return, no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, weights_R: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(gate_up, weights_R)
        gate, up = gate_up.chunk(2, -1)
        product = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for rows in iterate_row_chunks(gate_up):
            torch.mul(F.silu(gate[rows]), up[rows], out=product[rows])
            if weights_R is not None:
                torch.mul(product[rows], weights_R[rows, None], out=product[rows])
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate_up, weights_R = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        joined = torch.empty_like(gate_up)
        of_gate, of_up = joined.chunk(2, -1)
        of_weights_R = None if weights_R is None else torch.empty_like(weights_R)
        for rows in iterate_row_chunks(gate_up):
            activated, of_product = F.silu(gate[rows]), gradient[rows]
            if of_weights_R is not None:
                product = (activated * up[rows]).to(weights_R.dtype)
                torch.sum(product * of_product, -1, out=of_weights_R[rows])
                of_product = (of_product * weights_R[rows, None]).to(gate.dtype)
            torch.mul(of_product, activated, out=of_up[rows])
            torch.ops.aten.silu_backward.grad_input(
                of_product * up[rows], gate[rows], grad_input=of_gate[rows]
            )
        return joined, of_weights_R
