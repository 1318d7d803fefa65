import hashlib

import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.checksum import (
    compare_checksums,
    compute_rank_digests,
    hash_gpu_tensor,
)

QUERY = "model.layers.0.self_attn.q_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
VALUE = "model.layers.0.self_attn.v_proj.weight"
FUSED = "model.layers.0.self_attn.qkv_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def rows(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count * 4, dtype=torch.float32).reshape(count, 4)


def test_fused_parameters_are_hashed_in_the_servers_order_whatever_the_order_of_arrival() -> None:
    tensors = {VALUE: rows(2, 200), QUERY: rows(4), KEY: rows(2, 100)}
    whole = torch.cat([tensors[QUERY], tensors[KEY], tensors[VALUE]])
    assert compute_rank_digests(tensors, 0, 1, "cpu") == {FUSED: {digest(whole)}}


def test_ranks_hold_slices_and_repeated_key_value_heads() -> None:
    tensors = {QUERY: rows(4), KEY: rows(2, 100), VALUE: rows(2, 200), DOWN: rows(3)}
    found = compute_rank_digests(tensors, 1, 2, "cpu")
    sliced = torch.cat([rows(4)[2:], rows(2, 100)[1:], rows(2, 200)[1:]])
    repeated = torch.cat([rows(4)[2:], rows(2, 100), rows(2, 200)])
    assert found[FUSED] == {digest(sliced), digest(repeated)}
    assert found[DOWN] == {digest(rows(3)[:, 2:])}


def test_vocabulary_rows_are_padded_with_zeros() -> None:
    padded = torch.zeros(64, 4)
    padded[:50] = rows(50)
    found = compute_rank_digests({"lm_head.weight": rows(50)}, 0, 1, "cpu")
    assert found == {"lm_head.weight": {digest(padded)}}


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ({"a": "1", "b": "3"}, r"1 different \['b'\]"),
        ({"a": "1"}, r"1 unknown to the server \['b'\]"),
        ({"a": "1", "b": "2", "c": "4"}, r"1 never sent \['c'\]"),
        ({"a": "0", "b": "0"}, r"inference\.dtype"),
    ],
)
def test_every_kind_of_difference_is_named(reported: dict[str, str], message: str) -> None:
    expected = {"a": frozenset("1"), "b": frozenset("2")}
    compare_checksums(expected, {"a": "1", "b": "2", "model.experts.0.w13": "9"}, "replica 0")
    with pytest.raises(WeightSyncError, match=message):
        compare_checksums(expected, reported, "replica 0")


def reference_word_hash(data: bytes) -> int:
    """The same hash, one word at a time."""
    mask32, mask64 = (1 << 32) - 1, (1 << 64) - 1

    def fmix(word: int) -> int:
        word = ((word ^ word >> 16) * 0x85EBCA6B) & mask32
        word = ((word ^ word >> 13) * 0xC2B2AE35) & mask32
        return word ^ word >> 16

    def rotate(word: int, turn: int) -> int:
        return (word << turn | word >> (32 - turn)) & mask32

    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    seed = 0x243F6A88
    other = ((seed * 0x9E3779B1) ^ 0xDEADBEEF) & mask32
    total = 0
    for start in range(0, len(words), 8192):
        high = low = 0
        for at, word in enumerate(words[start : start + 8192], start):
            high += fmix(word ^ ((at * 0x27D4EB2D + seed) & mask32) ^ rotate(at, 15))
            low += fmix(word ^ ((at * 0x165667B1 + other) & mask32) ^ rotate(at, 13))
        size = len(words) * 4
        total += fmix((high & mask32) ^ size) << 32 | fmix((low & mask32) ^ size)
    total &= mask64
    total = ((total ^ total >> 30) * 0xBF58476D1CE4E5B9) & mask64
    total = ((total ^ total >> 27) * 0x94D049BB133111EB) & mask64
    return total ^ total >> 31


@pytest.mark.parametrize("size", [1, 4, 7, 4 * 8192, 4 * 8192 * 2 + 6])
def test_the_gpu_hash_equals_its_definition_word_by_word(size: int) -> None:
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert hash_gpu_tensor(flat) == reference_word_hash(bytes(flat.tolist()))


@pytest.mark.parametrize(
    ("size", "expected"), [(7, 0xCC0EA198474F9E19), (4 * 8192 * 2 + 6, 0x3C857FF3AFF33DF6)]
)
def test_the_gpu_hash_equals_sglangs_own_kernel(size: int, expected: int) -> None:
    """Recorded from sglang 0.5.23's kernel under Triton's interpreter."""
    assert hash_gpu_tensor((torch.arange(size) * 31 % 251).to(torch.uint8)) == expected
