"""Hashes of experts that arrive one by one, against those of the whole stacks."""

import hashlib
from collections.abc import Sequence

import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.buckets.plan import TensorSpec
from areal_hpc.weights.checksum import compute_sglang_gpu_hash
from areal_hpc.weights.expert_hashes import StackedExpertHashes

PREFIX = "model.layers.3.mlp.experts."
EXPERTS, FFN, HIDDEN = 3, 8, 12
WEIGHTS = {
    f"{PREFIX}{expert}.{part}_proj.weight": torch.randn(
        (HIDDEN, FFN) if part == "down" else (FFN, HIDDEN)
    )
    for expert in range(EXPERTS)
    for part in ("gate", "up", "down")
}
SPECS = [TensorSpec(name, tuple(held.shape), "float32") for name, held in WEIGHTS.items()]


def hash_of(parts: Sequence[torch.Tensor], device: str) -> str:
    content = b"".join(part.contiguous().numpy().tobytes() for part in parts)
    if device == "cpu":
        return hashlib.sha256(content).hexdigest()[:16]
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return f"{compute_sglang_gpu_hash(flat):016x}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (1, 2)])
def test_experts_of_several_buckets_are_hashed_as_the_server_stacks_them(
    rank: int, tp: int, device: str
) -> None:
    hashes = StackedExpertHashes(SPECS, rank, tp, device)
    names = [*WEIGHTS]
    for bucket in (names[:2], names[2:7], names[7:]):
        hashes.add({name: WEIGHTS[name] for name in reversed(bucket)} | {"norm": torch.ones(2)})
    rows, columns = slice(rank * FFN // tp, (rank + 1) * FFN // tp), FFN // tp
    up = [
        WEIGHTS[f"{PREFIX}{expert}.{part}_proj.weight"][rows]
        for expert in range(EXPERTS)
        for part in ("gate", "up")
    ]
    down = [
        WEIGHTS[f"{PREFIX}{expert}.down_proj.weight"][:, rank * columns : (rank + 1) * columns]
        for expert in range(EXPERTS)
    ]
    assert hashes.finish() == {
        f"{PREFIX}w13_weight": {hash_of(up, device)},
        f"{PREFIX}w2_weight": {hash_of(down, device)},
    }


def test_experts_out_of_order_are_refused() -> None:
    hashes = StackedExpertHashes(SPECS, 0, 1, "cpu")
    with pytest.raises(WeightSyncError, match=r"expected expert 0 of .*w2_weight, got .*1\.down"):
        hashes.add({name: WEIGHTS[name] for name in WEIGHTS if "1.down" in name})
