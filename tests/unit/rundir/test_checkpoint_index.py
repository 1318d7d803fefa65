"""The index of a checkpoint: merged of the ranks' parts, written, read, refused."""

from pathlib import Path

import pytest

from areal_hpc.errors import ShardError
from areal_hpc.rundir.checkpoint_index import (
    CHECKPOINT_INDEX_FILE,
    CheckpointIndex,
    Column,
    NumberType,
    RankIndex,
    StoredTensor,
    TensorPiece,
    merge_rank_indices,
    read_index_of_one_checkpoint,
    write_checkpoint_index,
)

COLUMNS: dict[Column, NumberType] = {
    "master": "float32",
    "exp_avg": "float32",
    "exp_avg_sq": "float32",
    "weight": "bfloat16",
}


def part(rank: int, first_row: int, rows: int) -> RankIndex:
    pieces = [TensorPiece(rank, 0, (first_row, 0), (rows, 3))]
    return RankIndex(rows * 3, {"embedding": StoredTensor((4, 3), pieces)})


def merge(*parts: RankIndex) -> CheckpointIndex:
    return merge_rank_indices(parts, COLUMNS, optimizer_steps=7)


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    index = merge(part(0, 0, 1), part(1, 1, 3))
    write_checkpoint_index(tmp_path, index)
    assert read_index_of_one_checkpoint(tmp_path) == index
    assert [piece.rank for piece in index.tensors["embedding"].pieces] == [0, 1]


@pytest.mark.parametrize("parts", [[part(0, 0, 1)], [part(0, 0, 3), part(1, 1, 3)]])
def test_a_tensor_with_numbers_missing_or_held_twice_is_a_defect(parts: list[RankIndex]) -> None:
    with pytest.raises(AssertionError, match="embedding"):
        merge(*parts)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"format": 3, "everything": "else"}', "format 3; this version reads format 2"),
        (b'{"format": 2}', "cannot be read"),
        (b"\xff", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / CHECKPOINT_INDEX_FILE).write_bytes(content)
    with pytest.raises(ShardError, match=said):
        read_index_of_one_checkpoint(tmp_path)
