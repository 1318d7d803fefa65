"""Attention over packed sequences, for Megatron-core's local layer spec.

Megatron-core leaves packed attention to Transformer Engine. Here the plan of the pack says how it
is attended to (`packed_attention`). Rotary embeddings are applied here too: Megatron's packed path
splits every tensor into its sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from areal_hpc.trainer.model.attention_plan import AttentionPlan, apply_rotary


class PackedCausalAttention(MegatronModule):  # type: ignore[misc]
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
        query, key = apply_rotary(query, plan), apply_rotary(key, plan)
        if self.context_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(part.contiguous(), group=self.context_group)
                for part in (key, value)
            )
        return plan.layout.attend(query, key, value, self.scale).flatten(1)
