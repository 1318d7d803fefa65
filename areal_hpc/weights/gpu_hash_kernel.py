"""SGLang's hash of a GPU tensor, as a Triton kernel that reads each byte once.

`checksum.py` has the same in plain torch, which takes some forty passes. CUDA's torch brings
Triton; this module is imported beside a GPU alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK_WORDS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _finalize_word(word: Any) -> Any:
    word ^= word >> 16
    word = word * tl.full((), 0x85EBCA6B, tl.uint32)
    word ^= word >> 13
    word = word * tl.full((), 0xC2B2AE35, tl.uint32)
    return word ^ (word >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _mix_word(
    value: Any, position: Any, seed: tl.constexpr, factor: tl.constexpr, turn: tl.constexpr
) -> Any:
    placed = position * tl.full((), factor, tl.uint32) + tl.full((), seed, tl.uint32)
    turned = (position << turn) | (position >> (32 - turn))
    return _finalize_word(value ^ placed ^ turned)


@triton.jit(do_not_specialize=["count", "first", "all_words"])  # type: ignore[untyped-decorator]
def _hash_tiles(
    words: Any,
    halves: Any,
    count: Any,
    first: Any,
    all_words: Any,
    HIGH_SEED: tl.constexpr,
    HIGH_FACTOR: tl.constexpr,
    HIGH_TURN: tl.constexpr,
    LOW_SEED: tl.constexpr,
    LOW_FACTOR: tl.constexpr,
    LOW_TURN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tile = tl.program_id(axis=0)
    high = tl.zeros((), dtype=tl.uint32)
    low = tl.zeros((), dtype=tl.uint32)
    for start in tl.static_range(0, TILE, BLOCK):
        at = tile.to(tl.int64) * TILE + start + tl.arange(0, BLOCK)
        is_there = at < count
        value = tl.load(words + at, mask=is_there, other=0).to(tl.uint32)
        position = (at + first).to(tl.uint32)
        nothing = tl.zeros_like(value)
        mixed = _mix_word(value, position, HIGH_SEED, HIGH_FACTOR, HIGH_TURN)
        high += tl.sum(tl.where(is_there, mixed, nothing), axis=0).to(tl.uint32)
        mixed = _mix_word(value, position, LOW_SEED, LOW_FACTOR, LOW_TURN)
        low += tl.sum(tl.where(is_there, mixed, nothing), axis=0).to(tl.uint32)
    size_bytes = tl.full((), all_words * 4, tl.uint32)
    tl.store(halves + 2 * tile, _finalize_word(high ^ size_bytes).to(tl.int64))
    tl.store(halves + 2 * tile + 1, _finalize_word(low ^ size_bytes).to(tl.int64))


def sum_tile_hashes(
    words: torch.Tensor,
    first_word: int,
    total_words: int,
    tile_words: int,
    halves: tuple[tuple[int, int, int], tuple[int, int, int]],
) -> tuple[int, int]:
    """Sums over all tiles of the high and of the low half. One wait for the GPU.

    Args:
        words: int32, one vector on a GPU: whole tiles of a tensor, but for its last one.
        first_word: Words of the tensor before these.
        total_words: Words of the tensor.
        tile_words: Words of a tile, a multiple of 1024.
        halves: (seed, factor, turn) of the high and of the low half.
    """
    tiles = -(-words.numel() // tile_words)
    found = torch.empty((tiles, 2), dtype=torch.int64, device=words.device)
    (high_seed, high_factor, high_turn), (low_seed, low_factor, low_turn) = halves
    _hash_tiles[(tiles,)](
        words.view(torch.uint32),
        found,
        words.numel(),
        first_word,
        total_words,
        HIGH_SEED=high_seed,
        HIGH_FACTOR=high_factor,
        HIGH_TURN=high_turn,
        LOW_SEED=low_seed,
        LOW_FACTOR=low_factor,
        LOW_TURN=low_turn,
        TILE=tile_words,
        BLOCK=_BLOCK_WORDS,
        num_warps=4,
    )
    high, low = found.sum(0).tolist()
    return high, low
