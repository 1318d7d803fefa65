"""RMSNorm and SwiGLU for Megatron-core's local layer spec, computed in chunks of rows."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS_BY_DEVICE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Values per chunk: 1 MiB of float32 fits a core's cache, 256 MiB keeps a GPU busy."""


def iterate_row_chunks(matrix: torch.Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS_BY_DEVICE[matrix.device.type] // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that supports sequence parallelism (Megatron's own wrapper refuses it).

    The weight's attribute makes `finalize_model_grads` sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension. PyTorch has a fused kernel for it, but not on a CPU."""
        if states.is_cuda or states.dtype != torch.float32:
            return F.rms_norm(states, self.normalized_shape, self.weight, self.eps)
        flat_TH = states.reshape(-1, states.shape[-1])
        normed: torch.Tensor = _RMSNormFunction.apply(flat_TH, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed.view(states.shape)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> Any:
        normed_TH = torch.empty_like(states_TH, memory_format=torch.contiguous_format)
        scale_T1 = states_TH.new_empty(len(states_TH), 1)
        for rows in iterate_row_chunks(states_TH):
            mean_square = states_TH[rows].square().mean(-1, keepdim=True)
            torch.rsqrt(mean_square.add_(eps), out=scale_T1[rows])
            torch.mul(states_TH[rows], scale_T1[rows], out=normed_TH[rows]).mul_(weight_H)
        ctx.save_for_backward(states_TH, weight_H, scale_T1)
        return normed_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        states_TH, weight_H, scale_T1 = ctx.saved_tensors
        states_gradient_TH = torch.empty_like(gradient_TH, memory_format=torch.contiguous_format)
        weight_gradient_H = torch.zeros_like(weight_H)
        for rows in iterate_row_chunks(states_TH):
            unit = states_TH[rows] * scale_T1[rows]
            product = gradient_TH[rows] * unit
            weight_gradient_H += product.sum(0)
            along = torch.mv(product, weight_H).div_(weight_H.numel())
            rows_gradient = torch.mul(gradient_TH[rows], weight_H, out=states_gradient_TH[rows])
            rows_gradient.addcmul_(unit, along[:, None], value=-1).mul_(scale_T1[rows])
        return states_gradient_TH, weight_gradient_H, None


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    *rows, width = gate_up.shape
    product = _SwiGLU.apply(gate_up.reshape(-1, width), None)  # type: ignore[no-untyped-call]
    return product.view(*rows, width // 2)  # type: ignore[no-any-return]


def weighted_swiglu(gate_up_RG: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up of [R, 2 F], each row times its float32 weight, in the rows' type.

    Products are rounded before and after the weight, as in Megatron's loop over experts.
    """
    return _SwiGLU.apply(gate_up_RG, weights_R)  # type: ignore[no-any-return, no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    """Gated activation in one step that keeps only its input.

    Megatron's own, without a compiled fusion, keeps two more activations of the MLP's width for the
    backward pass, and copies to join the gradients of gate and up projection.
    """

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
        gate_gradient, up_gradient = joined.chunk(2, -1)
        weights_gradient_R = None if weights_R is None else torch.empty_like(weights_R)
        for rows in iterate_row_chunks(gate_up):
            activated, product_gradient = F.silu(gate[rows]), gradient[rows]
            if weights_gradient_R is not None:
                product = (activated * up[rows]).to(weights_R.dtype)
                torch.sum(product * product_gradient, -1, out=weights_gradient_R[rows])
                product_gradient = (product_gradient * weights_R[rows, None]).to(gate.dtype)
            torch.mul(product_gradient, activated, out=up_gradient[rows])
            torch.ops.aten.silu_backward.grad_input(
                product_gradient * up[rows], gate[rows], grad_input=gate_gradient[rows]
            )
        return joined, weights_gradient_R
