"""Attention over packed sequences, for Megatron-core's local layer spec.

Megatron-core leaves packed attention to Transformer Engine. Here a pack is attended to segment by
segment, on a GPU in one kernel. Rotary embeddings are applied here too, from one table per pack:
Megatron's packed path splits every tensor into its sequences.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.autograd.function import once_differentiable

from areal_hpc.trainer.batch.packing import Pack, PackParallelism
from areal_hpc.trainer.model.kernels.varlen_attention import VarlenAttention, plan_varlen_attention


@dataclass(slots=True, eq=False)
class AttentionPlan:
    """Stands in for megatron.core's `PackedSeqParams`, of which its layers read `qkv_format`."""

    layout: VarlenAttention
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    scored_places_N: torch.Tensor
    """Local places whose logits are wanted."""
    qkv_format: str = "thd"


def plan_attention(
    pack: Pack,
    parallelism: PackParallelism,
    frequencies: torch.Tensor,
    rope_scale: float = 1.0,
) -> AttentionPlan:
    """Index tables and rotary angles of a pack built for `parallelism`, on the frequencies' device.

    Sines and cosines are float32, as the engine's are.
    """
    device = frequencies.device
    angles = torch.from_numpy(pack.positions_T).to(device)[:, None].float() * frequencies
    return AttentionPlan(
        layout=plan_varlen_attention(
            pack.padded_lengths, cp=parallelism.cp, cp_rank=parallelism.cp_rank, device=device
        ),
        cos_TD=angles.cos().mul_(rope_scale)[:, None],
        sin_TD=angles.sin().mul_(rope_scale)[:, None],
        scored_places_N=torch.from_numpy(pack.logit_places_N).to(device),
    )


class RotaryPackedCausalAttention(MegatronModule):  # type: ignore[misc]
    """The `core_attention` of a layer: rotary embedding, then causal attention within sequences.

    Under context parallelism keys and values are gathered from all ranks of the group.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.context_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: AttentionPlan,
        **_: Any,
    ) -> torch.Tensor:
        """Queries [t, heads, d], keys and values [t, kv_heads, d] to [t, heads * d]."""
        plan = packed_seq_params
        query, key = (_Rotary.apply(part, plan.cos_TD, plan.sin_TD) for part in (query, key))  # type: ignore[no-untyped-call]
        if self.context_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(part.contiguous(), group=self.context_group)
                for part in (key, value)
            )
        return plan.layout.attend(query, key, value, self.scale).flatten(1)


class _Rotary(torch.autograd.Function):
    """Rotary position embedding, the two halves of a head forming the pairs.

    The gradient of a rotation is turned back by the same angle, and has the same scale.
    """

    @staticmethod
    def forward(
        ctx: Any, states_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return _apply_rotary(states_TND, cos_TD, sin_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TND: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _apply_rotary(gradient_TND, cos_TD, -sin_TD), None, None


def _apply_rotary(
    states_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> torch.Tensor:
    states = states_TND.to(cos_TD.dtype)  # rounded once, after the rotation
    turned_TND = torch.empty_like(states, memory_format=torch.contiguous_format)
    first, second = states.chunk(2, -1)
    turned_first, turned_second = turned_TND.chunk(2, -1)
    torch.mul(first, cos_TD, out=turned_first).addcmul_(second, sin_TD, value=-1)
    torch.mul(second, cos_TD, out=turned_second).addcmul_(first, sin_TD)
    return turned_TND.to(states_TND.dtype)
