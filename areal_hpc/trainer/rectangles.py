"""A pack of sequences as padded rectangles, and its rotary angles: what attention is planned from.

Sequences of similar length are laid side by side, so that PyTorch's own attention takes them in
one call. That is exact (a causal query never sees the padding behind it) and far faster than one
call per sequence. Rotary angles come from one table per pack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

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


@dataclass(slots=True, eq=False)
class PackedAttention:
    """What the attention of every layer needs to know about one pack.

    Stands in for megatron.core's `PackedSeqParams`, of which its own layers read `qkv_format`.
    """

    cu_seqlens: torch.Tensor
    """Where each sequence begins, and the end of the last; over all context-parallel ranks."""
    longest: int
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    rectangles: list[Rectangle] = field(default_factory=list)
    queries: Slots | None = None
    """None where flash-attn takes the pack as it is."""
    keys: Slots | None = None
    qkv_format: str = "thd"


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
        cu_seqlens=cu_seqlens.to(device),
        longest=int(lengths.max()),
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
