"""Format 2 of checkpoints, byte by byte: written down here apart from the code that writes it."""

import json
import struct
import zlib
from pathlib import Path

import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.rundir.checkpoints import (
    Column,
    NumberType,
    RankIndex,
    StoredTensor,
    TensorPiece,
    merge_rank_indices,
    write_checkpoint_index,
)
from areal_hpc.trainer.checkpoints.stored_tensors import Box, open_stored_tensors
from areal_hpc.trainer.checkpoints.writer import write_rank_file

COLUMNS: dict[Column, NumberType] = {
    "master": "float32",
    "exp_avg": "float32",
    "exp_avg_sq": "float32",
    "weight": "bfloat16",
}
INDEX = {
    "format": 2,
    "optimizer_steps": 7,
    "columns": COLUMNS,
    "counts": [5, 2],
    "tensors": {
        "layers.weight": {
            "shape": [2, 2, 1],
            "pieces": [[0, 0, [0, 0, 0], [1, 2, 1]], [0, 2, [1, 0, 0], [1, 1, 1]],
                       [1, 0, [1, 1, 0], [1, 1, 1]]],
        },
        "norm": {"shape": [3], "pieces": [[0, 3, [0], [2]], [1, 1, [2], [1]]]},
    },
}  # fmt: skip
NUMBERS = {0: [1.0, 2.0, 3.0, 5.0, 6.0], 1: [4.0, 7.0]}


def content_of(rank: int) -> bytes:
    """A moment is ten times the master weight, its square a hundred times; weights are half."""
    numbers = NUMBERS[rank]
    columns = b"".join(
        struct.pack(f"<{len(numbers)}f", *(scale * one for one in numbers))
        for scale in (1, 10, 100)
    )
    # A bfloat16 is the upper half of a float32.
    columns += b"".join(struct.pack("<f", one / 2)[2:] for one in numbers)
    return columns + struct.pack("<I", zlib.crc32(columns))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "index.json").write_text(json.dumps(INDEX))
    for rank in NUMBERS:
        (tmp_path / f"rank_0000{rank}.bin").write_bytes(content_of(rank))
    return tmp_path


@pytest.mark.parametrize(
    ("column", "scale"), [("master", 1), ("exp_avg", 10), ("exp_avg_sq", 100), ("weight", 0.5)]
)
def test_tensors_are_read_from_the_files_of_all_ranks(
    checkpoint: Path, column: Column, scale: float
) -> None:
    with open_stored_tensors(checkpoint) as stored:
        assert stored.count_optimizer_steps() == 7
        assert stored.weight_dtype == torch.bfloat16
        assert [stored.find_shape(name) for name in ("layers.weight", "norm", "other")] == [
            (2, 2, 1), (3,), (),
        ]  # fmt: skip
        for layer, expected in enumerate(([1.0, 2.0], [3.0, 4.0])):
            target = torch.zeros(1, 2, 1)
            stored.read_block(column, "layers.weight", Box((layer, 0, 0), (1, 2, 1)), target)
            assert target.flatten().tolist() == [scale * one for one in expected]
        part = torch.zeros(2)
        stored.read_block(column, "norm", Box((1,), (2,)), part)
        assert part.tolist() == [scale * 6.0, scale * 7.0]


def test_files_are_written_so(tmp_path: Path) -> None:
    for rank in NUMBERS:
        file = tmp_path / f"rank_0000{rank}.bin"
        write_rank_file(memoryview(content_of(rank)[:-4]), file)
        assert file.read_bytes() == content_of(rank)


def test_the_index_is_written_so(tmp_path: Path) -> None:
    parts = [
        RankIndex(
            5,
            {
                "layers.weight": StoredTensor(
                    (2, 2, 1),
                    [
                        TensorPiece(0, 0, (0, 0, 0), (1, 2, 1)),
                        TensorPiece(0, 2, (1, 0, 0), (1, 1, 1)),
                    ],
                ),
                "norm": StoredTensor((3,), [TensorPiece(0, 3, (0,), (2,))]),
            },
        ),
        RankIndex(
            2,
            {
                "layers.weight": StoredTensor((2, 2, 1), [TensorPiece(1, 0, (1, 1, 0), (1, 1, 1))]),
                "norm": StoredTensor((3,), [TensorPiece(1, 1, (2,), (1,))]),
            },
        ),
    ]
    write_checkpoint_index(tmp_path, merge_rank_indices(parts, COLUMNS, optimizer_steps=7))
    # What came later is added; an index of before, as above, lacks it.
    assert json.loads((tmp_path / "index.json").read_text()) == INDEX | {"critic_steps": 0}
