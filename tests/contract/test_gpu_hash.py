"""The hash of a GPU tensor: SGLang's kernel, ours, and the one in plain torch give the same."""

from typing import Any

import pytest
import torch

from areal_hpc.weights import checksum
from areal_hpc.weights.checksum import compute_sglang_gpu_hash
from tests.support.environments import CHECKOUT
from tests.support.triton_stand_in import load_with_stand_in

SGLANG_KERNEL = next(
    (CHECKOUT / ".venvs/serve/lib").glob(
        "python3*/site-packages/sglang/kernels/ops/memory/gpu_tensor_hash.py"
    )
)
OWN_KERNEL = CHECKOUT / "areal_hpc" / "weights" / "gpu_hash_kernel.py"


class GpuLike(torch.Tensor):
    """On a CPU, and says otherwise."""

    is_cuda = property(lambda self: True)


@pytest.mark.parametrize("size", [4, 7, 4 * 1024, 4 * 8192, 4 * 8192 * 2 + 6, 4 * 8192 * 130 + 1])
def test_both_kernels_and_plain_torch_agree(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8)
    expected = compute_sglang_gpu_hash(flat)
    theirs: Any = load_with_stand_in(SGLANG_KERNEL, "sglang_hash", monkeypatch)
    assert theirs.gpu_tensor_hash(flat.as_subclass(GpuLike)) == expected
    ours: Any = load_with_stand_in(OWN_KERNEL, "own_hash", monkeypatch)
    words = torch.nn.functional.pad(flat, (0, -size % 4)).view(torch.int32)
    halves = checksum._HASH_HALF_CONSTANTS
    high, low = ours.sum_tile_hashes(words, 0, words.numel(), checksum._TILE_WORDS, halves)
    assert checksum._finish_hash((high << 32) + low) == expected
