import hashlib

import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.checksum import (
    SglangGpuHash,
    compute_non_expert_rank_digests,
    compute_sglang_gpu_hash,
    require_matching_comparable_checksums,
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
    assert compute_non_expert_rank_digests(tensors, 0, 1, "cpu") == {FUSED: {digest(whole)}}


def test_ranks_hold_slices_and_repeated_key_value_heads() -> None:
    tensors = {QUERY: rows(4), KEY: rows(2, 100), VALUE: rows(2, 200), DOWN: rows(3)}
    found = compute_non_expert_rank_digests(tensors, 1, 2, "cpu")
    sliced = torch.cat([rows(4)[2:], rows(2, 100)[1:], rows(2, 200)[1:]])
    repeated = torch.cat([rows(4)[2:], rows(2, 100), rows(2, 200)])
    assert found[FUSED] == {digest(sliced), digest(repeated)}
    assert found[DOWN] == {digest(rows(3)[:, 2:])}


def test_vocabulary_rows_are_padded_with_zeros() -> None:
    padded = torch.zeros(64, 4)
    padded[:50] = rows(50)
    found = compute_non_expert_rank_digests({"lm_head.weight": rows(50)}, 0, 1, "cpu")
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
    require_matching_comparable_checksums(expected, {"a": "1", "b": "2"}, "replica 0")
    with pytest.raises(WeightSyncError, match=message):
        require_matching_comparable_checksums(expected, reported, "replica 0")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 0x3D93A6540B54EF2A),
        (4, 0x2C01B095229C9EC6),
        (7, 0xCC0EA198474F9E19),
        (4 * 8192, 0x96C3F60ADB837791),
        (4 * 8192 * 2 + 6, 0x3C857FF3AFF33DF6),
        (2**24 + 3, 0x550052C817E9B58),
    ],
)
def test_the_gpu_hash_equals_sglangs_own_kernel(size: int, expected: int) -> None:
    """Recorded from sglang 0.5.23's kernel under Triton's interpreter.

    At 7 and 65542 bytes, that is; at the others from its definition, computed word by word.
    """
    assert (
        compute_sglang_gpu_hash((torch.arange(size, dtype=torch.int32) * 31 % 251).byte())
        == expected
    )


LAYERS = (0, 1)
EXPERTS = {
    f"layer.{at}.experts.{kind}_weight": frozenset("1") for at in LAYERS for kind in ("a", "b")
}


def report(**hashes: str) -> dict[str, str]:
    """What a replica says of its experts, by kind: a hash for each layer."""
    return {
        f"layer.{at}.experts.{kind}_weight": hashes[kind][at] for kind in hashes for at in LAYERS
    }


def test_a_kind_of_experts_that_a_kernel_has_in_its_own_layout_is_not_compared() -> None:
    require_matching_comparable_checksums(EXPERTS, report(a="11", b="11"), "replica 0")
    require_matching_comparable_checksums(
        EXPERTS, report(a="11", b="77"), "replica 0", replica_device="cuda"
    )
    require_matching_comparable_checksums(EXPERTS, {}, "replica 0", replica_device="cuda")
    with pytest.raises(WeightSyncError, match=r"1 different \['layer.1.experts.a_weight'\]"):
        require_matching_comparable_checksums(
            EXPERTS, report(a="17", b="77"), "replica 0", replica_device="cuda"
        )
    with pytest.raises(WeightSyncError, match="2 different"):
        require_matching_comparable_checksums(EXPERTS, report(a="11", b="77"), "replica 0")
    with pytest.raises(WeightSyncError, match="4 unknown to the server"):
        require_matching_comparable_checksums(
            {**EXPERTS, "c": frozenset("1")}, {"c": "1"}, "replica 0"
        )


@pytest.mark.parametrize("cuts", [(3,), (4 * 8192,), (5, 4 * 8192 + 9), (4 * 8192 * 2, 70000)])
def test_the_gpu_hash_of_pieces_is_that_of_the_whole(cuts: tuple[int, ...]) -> None:
    flat = (torch.arange(4 * 8192 * 3 + 6, dtype=torch.int32) * 37 % 253).byte()
    streamed = SglangGpuHash(len(flat))
    for piece in flat.tensor_split(cuts):
        streamed.update(piece)
    assert streamed.finish() == compute_sglang_gpu_hash(flat)
