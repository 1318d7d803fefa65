"""Attention over packed sequences, and the layer norms, for Megatron-core's local layer spec.

Megatron-core leaves packed attention to Transformer Engine. Here a pack is attended to in padded
rectangles (`rectangles`), or by flash-attn on a GPU. Rotary embeddings are applied here too:
Megatron's packed path splits every tensor into its sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from areal_hpc.trainer.rectangles import PackedAttention, collect, rotate, spread


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
        packed_seq_params: PackedAttention,
        **_: Any,
    ) -> torch.Tensor:
        """Queries [t, heads, d], keys and values [t, kv_heads, d] to [t, heads * d]."""
        plan = packed_seq_params
        query, key = rotate(query, plan), rotate(key, plan)
        if plan.queries is None or plan.keys is None:
            return self._flash(query, key, value.contiguous(), plan)
        if self.context_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(part.contiguous(), group=self.context_group)
                for part in (key, value)
            )
        queries = spread(query, plan.queries)
        keys, values = spread(key, plan.keys), spread(value, plan.keys)
        outputs = []
        query_end = key_end = 0
        for box in plan.rectangles:
            query_start, key_start = query_end, key_end
            query_end += box.sequences * box.query_places
            key_end += box.sequences * box.key_places
            q, k, v = (
                states[start:end].reshape(box.sequences, -1, *states.shape[1:]).transpose(1, 2)
                for states, start, end in (
                    (queries, query_start, query_end),
                    (keys, key_start, key_end),
                    (values, key_start, key_end),
                )
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=box.mask, is_causal=box.mask is None, scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        filled = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return collect(filled, plan.queries).flatten(1)

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PackedAttention
    ) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        attended: torch.Tensor = flash_attn_varlen_func(
            query, key, value, plan.cu_seqlens, plan.cu_seqlens, plan.longest, plan.longest,
            softmax_scale=self.scale, causal=True,
        )  # fmt: skip
        return attended.flatten(1)


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that sequence parallelism accepts (Megatron's own wrapper refuses).

    The tag on the weight makes `finalize_model_grads` sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
