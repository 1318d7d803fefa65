"""RMSNorm for Megatron-core's local layer spec, and the rows that kernels take at a time."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS_BY_DEVICE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Values of one chunk: 1 MiB of float32 fits a core's cache, 256 MiB keeps a GPU busy."""


def iterate_row_chunks(matrix: torch.Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS_BY_DEVICE[matrix.device.type] // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that sequence parallelism accepts (Megatron's own wrapper refuses).

    The tag on the weight makes `finalize_model_grads` sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension. PyTorch has one kernel for it, but not on a CPU."""
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
        of_states_TH = torch.empty_like(gradient_TH, memory_format=torch.contiguous_format)
        of_weight_H = torch.zeros_like(weight_H)
        for rows in iterate_row_chunks(states_TH):
            unit = states_TH[rows] * scale_T1[rows]
            product = gradient_TH[rows] * unit
            of_weight_H += product.sum(0)
            along = torch.mv(product, weight_H).div_(weight_H.numel())
            of_rows = torch.mul(gradient_TH[rows], weight_H, out=of_states_TH[rows])
            of_rows.addcmul_(unit, along[:, None], value=-1).mul_(scale_T1[rows])
        return of_states_TH, of_weight_H, None
