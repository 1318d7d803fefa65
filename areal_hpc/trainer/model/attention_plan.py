"""Attention plan of one pack: where attention may look, and the rotary angles.

On a CPU a pack is attended to in padded rectangles, on a GPU segment by segment in one kernel.
Rotary angles come from one table per pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from areal_hpc.trainer.batch.packing import IntArray
from areal_hpc.trainer.model.cpu.padded_sdpa import PaddedSdpa, plan_padded_sdpa
from areal_hpc.trainer.model.kernels.varlen_attention import VarlenAttention, plan_varlen_attention


@dataclass(slots=True, eq=False)
class AttentionPlan:
    """Stands in for megatron.core's `PackedSeqParams`, of which its layers read `qkv_format`."""

    layout: PaddedSdpa | VarlenAttention
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    scored_N: torch.Tensor
    """Local places whose logits are wanted."""
    qkv_format: str = "thd"


def plan_attention(
    lengths: IntArray,
    positions_T: IntArray,
    scored_N: IntArray,
    frequencies: torch.Tensor,
    *,
    cp: int,
    cp_rank: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Index tables and rotary angles of one pack, on the frequencies' device.

    Args:
        lengths: Padded length of each sequence over all context-parallel ranks.
        positions_T: In-sequence position of each local token.
        scored_N: Local places whose logits are wanted.
        frequencies: Rotary angle per position [head_dim / 2], float32.
        cp: Context-parallel size.
        cp_rank: This rank's place in the context-parallel group.
        dtype: Of the activations.
    """
    device = frequencies.device
    angles = torch.from_numpy(positions_T).to(device)[:, None].float() * frequencies
    plan = plan_varlen_attention if device.type == "cuda" else plan_padded_sdpa
    return AttentionPlan(
        layout=plan(lengths, cp=cp, cp_rank=cp_rank, device=device),
        cos_TD=angles.cos().to(dtype)[:, None],
        sin_TD=angles.sin().to(dtype)[:, None],
        scored_N=torch.from_numpy(scored_N).to(device),
    )


def apply_rotary(states_TND: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Rotary position embedding, the two halves of a head forming the pairs."""
    return _Rotate.apply(states_TND, plan.cos_TD, plan.sin_TD)  # type: ignore[no-any-return, no-untyped-call]


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is turned back by the same angle."""

    @staticmethod
    def forward(
        ctx: Any, states_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return _turned(states_TND, cos_TD, sin_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TND: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _turned(gradient_TND, cos_TD, -sin_TD), None, None


def _turned(states_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    turned_TND = torch.empty_like(states_TND, memory_format=torch.contiguous_format)
    first, second = states_TND.chunk(2, -1)
    turned_first, turned_second = turned_TND.chunk(2, -1)
    torch.mul(first, cos_TD, out=turned_first).addcmul_(second, sin_TD, value=-1)
    torch.mul(second, cos_TD, out=turned_second).addcmul_(first, sin_TD)
    return turned_TND
