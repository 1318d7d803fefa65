"""Attention over packed sequences, for Megatron-core's local layer spec.

Megatron-core leaves packed attention to Transformer Engine. This module attends segment by segment,
on a GPU in one kernel. It also applies rotary embeddings, from one table per pack: Megatron's
packed path would split every tensor into its sequences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

from areal_hpc.trainer.batch.packing import (
    IntArray,
    Pack,
    PackParallelism,
    locate_sequence_after_cp_gather,
)
from areal_hpc.trainer.private_apis.torch_private import run_flash_attention

AttendSegment = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True, eq=False)
class VarlenAttention:
    """Segments of a pack's queries, each with the keys that it may attend to.

    A segment is a run of consecutive queries of one sequence. Its keys are that sequence from its
    first token to the segment's last one, so the mask is causal, aligned at the end, and never
    stored as a tensor. Without context parallelism a segment is a sequence. With it each sequence
    gives a rank two segments, its zig-zag chunks, whose keys are selected from those gathered from
    all ranks. Memory is linear in the tokens, work in the sum of (queries x keys) of the segments.

    S: segments, in the order of their queries. Starts have S + 1 entries, int32.
    """

    query_lengths: list[int]
    key_lengths: list[int]
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    key_indices: torch.Tensor | None
    """Indices of each segment's keys among the gathered ones; None for all in their order."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend by queries [t, heads, d] to gathered keys, values [k, kv_heads, d]: [t, heads, d].

        Only the fused kernel has a `window`: the number of last keys, including the query's own.
        """
        if can_use_flash(query):
            # One call for all segments: its mask and its window are aligned at the end, as theirs.
            key, value = self._pick_keys(key, value)
            return run_flash_attention(
                query, key, value, self.query_starts, self.key_starts,
                max(self.query_lengths), max(self.key_lengths), scale, window,
            )  # fmt: skip
        assert window is None
        return self.attend_per_segment(query, key, value, scale)

    def _pick_keys(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.key_indices is None:
            return key, value
        return key.index_select(0, self.key_indices), value.index_select(0, self.key_indices)

    def attend_by(
        self, attend_segment: AttendSegment, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attend as `attend` does, with another function for a segment [1, heads, tokens, d]."""
        key, value = self._pick_keys(key, value)
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        parts = zip(
            query.split(self.query_lengths, 2),
            key.split(self.key_lengths, 2),
            value.split(self.key_lengths, 2),
            strict=True,
        )
        attended = [attend_segment(*part) for part in parts]
        whole = attended[0] if len(attended) == 1 else torch.cat(attended, 2)
        return whole[0].transpose(0, 1)

    def attend_per_segment(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend in one call per segment: on a CPU, and in float32, which FlashAttention lacks."""
        is_grouped = query.shape[1] != key.shape[1]
        if is_grouped and query.is_cuda:  # CUDA's memory-saving kernel has no grouped heads
            copies = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(copies, 1) for part in (key, value))
            is_grouped = False

        def attend_segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            is_square = q.shape[2] == k.shape[2]
            mask = None if is_square else causal_lower_right(q.shape[2], k.shape[2])
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_square, scale=scale, enable_gqa=is_grouped
            )

        return self.attend_by(attend_segment, query, key, value)


def can_use_flash(query: torch.Tensor) -> bool:
    head_dim = query.shape[-1]
    return query.is_cuda and query.dtype != torch.float32 and head_dim % 8 == 0 and head_dim <= 256


def plan_varlen_attention(
    lengths: IntArray, *, cp: int, cp_rank: int, device: torch.device
) -> VarlenAttention:
    """Plan the segments of one context-parallel rank, for sequences of these padded lengths."""
    if cp == 1:
        queries, keys, key_indices = lengths, lengths, None
    else:
        chunks = lengths // (2 * cp)
        queries = np.repeat(chunks, 2)
        ends = np.array([cp_rank + 1, 2 * cp - cp_rank])
        keys = (chunks[:, None] * ends).ravel()
        indices = [
            locate_sequence_after_cp_gather(index, lengths, cp) for index in range(len(lengths))
        ]
        selected = [indices[segment // 2][: keys[segment]] for segment in range(len(keys))]
        key_indices = torch.from_numpy(np.concatenate(selected)).to(device)
    return VarlenAttention(
        query_lengths=queries.tolist(),
        key_lengths=keys.tolist(),
        query_starts=_compute_starts(queries, device),
        key_starts=_compute_starts(keys, device),
        key_indices=key_indices,
    )


def _compute_starts(lengths: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)).to(device)


@dataclass(slots=True, eq=False)
class AttentionPlan:
    """Replacement for megatron.core's `PackedSeqParams`, of which layers read `qkv_format`."""

    layout: VarlenAttention
    positions_T: torch.Tensor
    """Position of each token within its row."""
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    scored_indices_N: torch.Tensor
    """Local indices whose logits are needed."""
    qkv_format: str = "thd"


def plan_attention(
    pack: Pack,
    parallelism: PackParallelism,
    frequencies: torch.Tensor,
    rope_scale: float = 1.0,
) -> AttentionPlan:
    """Compute index tables and rotary angles of a pack, on the frequencies' device.

    The pack must be built for `parallelism`. Sines and cosines are float32, like the engine's.
    """
    device = frequencies.device
    positions_T = torch.from_numpy(pack.positions_T).to(device)
    angles = positions_T[:, None].float() * frequencies
    return AttentionPlan(
        layout=plan_varlen_attention(
            pack.padded_lengths, cp=parallelism.cp, cp_rank=parallelism.cp_rank, device=device
        ),
        positions_T=positions_T,
        cos_TD=angles.cos().mul_(rope_scale)[:, None],
        sin_TD=angles.sin().mul_(rope_scale)[:, None],
        scored_indices_N=torch.from_numpy(pack.logit_indices_N).to(device),
    )


class RotaryPackedCausalAttention(MegatronModule):  # type: ignore[misc]
    """`core_attention` of a layer: rotary embedding, then causal attention within sequences.

    Under context parallelism it gathers keys and values from all ranks of the group.
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
        """Map queries [t, heads, d], keys and values [t, kv_heads, d] to [t, heads * d]."""
        plan = packed_seq_params
        query, key = (_Rotary.apply(part, plan.cos_TD, plan.sin_TD) for part in (query, key))  # type: ignore[no-untyped-call]
        if self.context_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(part.contiguous(), group=self.context_group)
                for part in (key, value)
            )
        return plan.layout.attend(query, key, value, self.scale).flatten(1)


class _Rotary(torch.autograd.Function):
    """Rotary position embedding, in which the two halves of a head form the pairs.

    If there are fewer angles than pairs, the end of a head stays as it is. The gradient of a
    rotation is rotated back by the same angle, and has the same scale.
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
    rotated = 2 * cos_TD.shape[-1]
    turned_TND[..., rotated:] = states[..., rotated:]
    first, second = states[..., :rotated].chunk(2, -1)
    turned_first, turned_second = turned_TND[..., :rotated].chunk(2, -1)
    torch.mul(first, cos_TD, out=turned_first).addcmul_(second, sin_TD, value=-1)
    torch.mul(second, cos_TD, out=turned_second).addcmul_(first, sin_TD)
    return turned_TND.to(states_TND.dtype)
