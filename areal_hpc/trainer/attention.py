"""Attention over packed sequences, and the layer norms, for Megatron-core's local layer spec.

Megatron-core leaves packed attention to Transformer Engine. Here sequences of similar length are
laid side by side in a padded rectangle for PyTorch's own attention, which is exact (a causal
query never sees the padding behind it) and far faster than one call per sequence; with
flash-attn on a GPU the pack is taken as it is. Rotary embeddings are applied here too, from one
table per pack: Megatron's packed path splits every tensor into its sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from areal_hpc.trainer.packing import zig_zag

Ints = npt.NDArray[np.int64]

HAS_FLASH_ATTENTION = find_spec("flash_attn") is not None

LENGTH_RATIO = 0.75
"""Sequences share a rectangle while they are at least this share of its longest."""


@dataclass(slots=True, eq=False)
class Rectangle:
    """Sequences attended to together. S: sequences, L: places of the longest."""

    sequences: int
    query_places: int
    key_places: int
    mask: torch.Tensor | None
    """[S, 1, L_query, L_key], True where a query may look; None is plain causal."""


@dataclass(slots=True, eq=False)
class Slots:
    """Where the tokens of a pack stand in the concatenated rectangles."""

    token_of_slot: torch.Tensor
    """Rows to copy into the rectangles; padding repeats row 0."""
    slot_of_token: torch.Tensor


@dataclass
class PackedAttention(PackedSeqParams):  # type: ignore[misc]
    """What the attention of every layer needs to know about one pack."""

    cos_TD: torch.Tensor = field(default_factory=torch.Tensor)
    sin_TD: torch.Tensor = field(default_factory=torch.Tensor)
    rectangles: list[Rectangle] = field(default_factory=list)
    queries: Slots | None = None
    keys: Slots | None = None


def similar_lengths(lengths: Ints) -> list[Ints]:
    """Sequence indices, longest first, grouped so that little of each rectangle is padding."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        if not groups or lengths[index] < LENGTH_RATIO * longest:
            groups.append([])
            longest = int(lengths[index])
        groups[-1].append(int(index))
    return [np.array(group) for group in groups]


def plan_attention(
    lengths: Ints,
    positions_T: Ints,
    frequencies: torch.Tensor,
    *,
    cp: int,
    cp_rank: int,
    dtype: torch.dtype,
) -> PackedAttention:
    """Index tables and rotary angles of one pack, on the frequencies' device.

    Args:
        lengths: Padded length of each sequence over all context-parallel ranks.
        positions_T: In-sequence position of each local token.
        frequencies: Rotary angle per position [head_dim / 2], float32.
        cp: Context-parallel size.
        cp_rank: This rank's place in the context-parallel group.
        dtype: Of the activations.
    """
    device = frequencies.device
    angles = torch.from_numpy(positions_T).to(device)[:, None].float() * frequencies
    cu_seqlens = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    plan = PackedAttention(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens.to(device),
        cu_seqlens_kv=cu_seqlens.to(device),
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
        cos_TD=angles.cos().to(dtype)[:, None],
        sin_TD=angles.sin().to(dtype)[:, None],
    )
    if uses_flash_attention(device, dtype, cp):
        return plan
    local = [zig_zag(int(n), cp, cp_rank) if cp > 1 else np.arange(int(n)) for n in lengths]
    query_starts = np.concatenate([[0], np.cumsum([len(part) for part in local])])
    query_tables: list[Ints] = []
    key_tables: list[Ints] = []
    for group in similar_lengths(lengths):
        queries = _rectangle([query_starts[i] + np.arange(len(local[i])) for i in group])
        keys = _rectangle([_gathered_places(i, lengths, cp) for i in group])
        mask = None
        if cp > 1:
            positions = _rectangle([local[i] for i in group], filler=0)
            visible = positions[:, None, :, None] >= np.arange(keys.shape[1])
            mask = torch.from_numpy(visible).to(device)
        plan.rectangles.append(Rectangle(len(group), queries.shape[1], keys.shape[1], mask))
        query_tables.append(queries)
        key_tables.append(keys)
    plan.queries = _slots(query_tables, int(query_starts[-1]), device)
    plan.keys = _slots(key_tables, int(lengths.sum()), device) if cp > 1 else plan.queries
    return plan


def uses_flash_attention(device: torch.device, dtype: torch.dtype, cp: int) -> bool:
    """True where flash-attn takes the pack as it is: a GPU, 16-bit, no context parallelism."""
    return device.type == "cuda" and HAS_FLASH_ATTENTION and dtype != torch.float32 and cp == 1


def _gathered_places(index: int, lengths: Ints, cp: int) -> Ints:
    """Where each position of a sequence lies once all ranks' tokens are gathered rank by rank."""
    local_total = int(lengths.sum()) // cp
    start = int(lengths[:index].sum()) // cp
    if cp == 1:
        return start + np.arange(int(lengths[index]))
    places = np.empty(int(lengths[index]), dtype=np.int64)
    for rank in range(cp):
        held = zig_zag(int(lengths[index]), cp, rank)
        places[held] = rank * local_total + start + np.arange(len(held))
    return places


def _rectangle(rows: list[Ints], filler: int = -1) -> Ints:
    table = np.full((len(rows), max(len(row) for row in rows)), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def _slots(tables: list[Ints], tokens: int, device: torch.device) -> Slots:
    token_of_slot = np.concatenate([table.ravel() for table in tables])
    filled = np.flatnonzero(token_of_slot >= 0)
    slot_of_token = np.empty(tokens, dtype=np.int64)
    slot_of_token[token_of_slot[filled]] = filled
    return Slots(
        torch.from_numpy(np.maximum(token_of_slot, 0)).to(device),
        torch.from_numpy(slot_of_token).to(device),
    )


class _Spread(torch.autograd.Function):
    """Tokens into slots. Gradients at padding are zero by causality, so backward only reads."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, slots: Slots) -> torch.Tensor:
        ctx.slots = slots
        return tokens.index_select(0, slots.token_of_slot)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.index_select(0, ctx.slots.slot_of_token), None


def spread(tokens: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Tokens [t, ...] into the places of the rectangles."""
    return _Spread.apply(tokens, slots)  # type: ignore[no-any-return, no-untyped-call]


class _Collect(torch.autograd.Function):
    """Slots back into tokens; padding receives no gradient."""

    @staticmethod
    def forward(ctx: Any, filled: torch.Tensor, slots: Slots) -> torch.Tensor:
        ctx.slots = slots
        return filled.index_select(0, slots.slot_of_token)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        slots = ctx.slots
        spread = gradient.new_zeros(len(slots.token_of_slot), *gradient.shape[1:])
        return spread.index_copy_(0, slots.slot_of_token, gradient), None


def collect(filled: torch.Tensor, slots: Slots) -> torch.Tensor:
    """The inverse of `spread`: one row per token, padding left behind."""
    return _Collect.apply(filled, slots)  # type: ignore[no-any-return, no-untyped-call]


def rotate(states_TND: torch.Tensor, plan: PackedAttention) -> torch.Tensor:
    """Rotary position embedding, the two halves of a head forming the pairs."""
    first, second = states_TND.chunk(2, -1)
    cos, sin = plan.cos_TD, plan.sin_TD
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


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
            query, key, value, plan.cu_seqlens_q, plan.cu_seqlens_kv, plan.max_seqlen_q,
            plan.max_seqlen_kv, softmax_scale=self.scale, causal=True,
        )  # fmt: skip
        return attended.flatten(1)


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that sequence parallelism accepts (Megatron's own wrapper refuses).

    The tag on the weight makes `finalize_model_grads` sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
