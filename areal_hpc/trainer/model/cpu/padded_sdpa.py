"""A pack of sequences as padded rectangles: attention on a CPU.

Sequences of similar length are laid side by side, so that PyTorch's own attention takes them in
one call. That is exact (a causal query never sees the padding behind it) and far faster than one
call per sequence.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from areal_hpc.trainer.batch.packing import (
    IntArray,
    get_zigzag_positions,
    locate_sequence_after_cp_gather,
)

MIN_LENGTH_RATIO = 0.75
"""Sequences share a rectangle while they are at least this share of its longest."""


@dataclass(slots=True, eq=False)
class PaddedGroup:
    """Sequences attended to together. S: sequences, L: places of the longest."""

    sequences: int
    padded_query_length: int
    padded_key_length: int
    mask: torch.Tensor | None
    """[S, 1, L_query, L_key], True where a query may look; None is plain causal."""


@dataclass(slots=True, eq=False)
class TokenSlots:
    """Positions of a pack's tokens in the concatenated rectangles."""

    token_of_slot: torch.Tensor
    """Rows to copy into the rectangles; padding repeats row 0."""
    slot_of_token: torch.Tensor


@dataclass(slots=True, eq=False)
class PaddedAttentionLayout:
    """All rectangles of a pack. Slots are None where the tokens already stand in order."""

    padded_groups: list[PaddedGroup]
    queries: TokenSlots | None
    keys: TokenSlots | None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Queries [t, heads, d] over gathered keys and values [k, kv_heads, d]: [t, heads, d]."""
        query_sizes = [box.sequences * box.padded_query_length for box in self.padded_groups]
        key_sizes = [box.sequences * box.padded_key_length for box in self.padded_groups]
        outputs = []
        for box, *parts in zip(
            self.padded_groups,
            scatter_to_slots(query, self.queries).split(query_sizes),
            scatter_to_slots(key, self.keys).split(key_sizes),
            scatter_to_slots(value, self.keys).split(key_sizes),
            strict=True,
        ):
            q, k, v = (
                part.view(box.sequences, -1, *part.shape[1:]).transpose(1, 2) for part in parts
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=box.mask, is_causal=box.mask is None, scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return gather_from_slots(
            outputs[0] if len(outputs) == 1 else torch.cat(outputs), self.queries
        )


def group_by_similar_length(lengths: IntArray) -> list[IntArray]:
    """Sequence indices, longest first, grouped so that little of each rectangle is padding."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        if not groups or lengths[index] < MIN_LENGTH_RATIO * longest:
            groups.append([])
            longest = int(lengths[index])
        groups[-1].append(int(index))
    return [np.array(group) for group in groups]


def plan_padded_sdpa(
    lengths: IntArray, *, cp: int, cp_rank: int, device: torch.device
) -> PaddedAttentionLayout:
    """The rectangles of one context-parallel rank, for sequences of these padded lengths."""
    local = [get_zigzag_positions(int(length), cp, cp_rank) for length in lengths]
    query_starts = np.concatenate([[0], np.cumsum([len(part) for part in local])])
    boxes: list[PaddedGroup] = []
    query_tables: list[IntArray] = []
    key_tables: list[IntArray] = []
    for group in group_by_similar_length(lengths):
        queries = _pad_index_rows([query_starts[i] + np.arange(len(local[i])) for i in group])
        keys = _pad_index_rows([locate_sequence_after_cp_gather(i, lengths, cp) for i in group])
        mask = None
        if cp > 1:
            positions = _pad_index_rows([local[i] for i in group], filler=0)
            visible = positions[:, None, :, None] >= np.arange(keys.shape[1])
            mask = torch.from_numpy(visible).to(device)
        boxes.append(PaddedGroup(len(group), queries.shape[1], keys.shape[1], mask))
        query_tables.append(queries)
        key_tables.append(keys)
    query_slots = _build_token_slots(query_tables, int(query_starts[-1]), device)
    key_slots = (
        _build_token_slots(key_tables, int(lengths.sum()), device) if cp > 1 else query_slots
    )
    return PaddedAttentionLayout(boxes, query_slots, key_slots)


def _pad_index_rows(rows: list[IntArray], filler: int = -1) -> IntArray:
    table = np.full((len(rows), max(len(row) for row in rows)), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def _build_token_slots(
    tables: list[IntArray], tokens: int, device: torch.device
) -> TokenSlots | None:
    token_of_slot = np.concatenate([table.ravel() for table in tables])
    if np.array_equal(token_of_slot, np.arange(tokens)):
        return None
    filled = np.flatnonzero(token_of_slot >= 0)
    slot_of_token = np.empty(tokens, dtype=np.int64)
    slot_of_token[token_of_slot[filled]] = filled
    return TokenSlots(
        torch.from_numpy(np.maximum(token_of_slot, 0)).to(device),
        torch.from_numpy(slot_of_token).to(device),
    )


class _ScatterToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, slots: TokenSlots) -> torch.Tensor:
        ctx.slots = slots
        return tokens.index_select(0, slots.token_of_slot)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.index_select(0, ctx.slots.slot_of_token), None


def scatter_to_slots(tokens: torch.Tensor, slots: TokenSlots | None) -> torch.Tensor:
    if slots is None:
        return tokens
    return _ScatterToSlots.apply(tokens, slots)  # type: ignore[no-any-return, no-untyped-call]


class _GatherFromSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot_values: torch.Tensor, slots: TokenSlots) -> torch.Tensor:
        ctx.slots = slots
        return slot_values.index_select(0, slots.slot_of_token)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        slots = ctx.slots
        spread = gradient.new_zeros(len(slots.token_of_slot), *gradient.shape[1:])
        return spread.index_copy_(0, slots.slot_of_token, gradient), None


def gather_from_slots(slot_values: torch.Tensor, slots: TokenSlots | None) -> torch.Tensor:
    if slots is None:
        return slot_values
    return _GatherFromSlots.apply(slot_values, slots)  # type: ignore[no-any-return, no-untyped-call]
