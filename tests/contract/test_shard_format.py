"""Formats of shards and checkpoints stay fixed: golden files open, and writers write their like."""

import json
import struct
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import msgspec
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
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.schema import (
    ALIGNMENT_BYTES,
    ALWAYS_WRITTEN_DATASETS,
    OFFSETS_BY_JSON_DATASET,
)
from areal_hpc.shards.verify import measure_file
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.trainer.checkpoints.store import write_rank_file
from areal_hpc.trainer.checkpoints.stored_tensors import Box, open_stored_tensors
from tests.support.environments import CHECKOUT
from tests.support.sample_trajectories import fields

GOLDEN = CHECKOUT / "tests" / "golden" / "shard_v2.h5"
"""Never made anew: old files must open forever. A file beside it describes the content."""
EXPECTED = json.loads(GOLDEN.with_suffix(".json").read_bytes())


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Seal the golden rows with today's writer."""
    rows = ShardReader(GOLDEN).read_rows(range(len(EXPECTED)))
    return tmp_path / write_sealed_shard(rows, tmp_path, tmp_path / "index", "golden").file


def read_values(file: h5py.File, name: str) -> list[Any]:
    """Return a dataset's values, JSON values as objects because their members have no order."""
    values = file[name][:]
    if name not in OFFSETS_BY_JSON_DATASET:
        return list(values.tolist())
    bounds = pairwise(file[OFFSETS_BY_JSON_DATASET[name]][:].tolist())
    return [json.loads(values[first:last].tobytes()) for first, last in bounds]


def structure(path: Path) -> dict[str, Any]:
    """Describe a shard's HDF5 layout without offsets and times."""
    with h5py.File(path, "r") as file:
        attributes = {name: (type(value), value) for name, value in file.attrs.items()}
        del attributes["created"]
        datasets = {
            name: (
                dataset.dtype.str,
                dataset.shape,
                dataset.maxshape,
                dataset.chunks,
                dataset.compression,
                dict(dataset.attrs),
                read_values(file, name),
            )
            for name, dataset in file.items()
        }
        return {"attributes": attributes, "datasets": datasets}


def test_the_golden_file_has_not_changed() -> None:
    assert measure_file(GOLDEN) == (15044, "crc32:0e60a431")


def test_the_golden_file_reads_as_the_rows_it_was_written_from() -> None:
    reader = ShardReader(GOLDEN)
    rows = [fields(row) for row in reader.read_rows(range(reader.num_rows))]
    assert json.loads(msgspec.json.encode(rows)) == EXPECTED
    records = json.loads(msgspec.json.encode(reader.read_records()))
    assert records == [row["record"] for row in EXPECTED]
    with h5py.File(GOLDEN, "r") as file:
        assert (file.attrs["writer"], file.attrs["created"][:4]) == ("golden", "2026")


def test_the_writer_still_writes_the_like_of_the_golden_file(fresh: Path) -> None:
    assert structure(fresh) == structure(GOLDEN)


def test_the_schema_lists_exactly_what_is_written(fresh: Path) -> None:
    with h5py.File(fresh, "r") as file:
        assert set(file) == {dataset.name for dataset in ALWAYS_WRITTEN_DATASETS}
        assert set(file.attrs) == {"format", "version", "writer", "created"}
        for dataset in ALWAYS_WRITTEN_DATASETS:
            assert file[dataset.name].dtype == dataset.dtype
            assert file[dataset.name].id.get_offset() % ALIGNMENT_BYTES == 0


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
    """Each moment is ten times the master weight, its square a hundred times; weights are half."""
    numbers = NUMBERS[rank]
    columns = b"".join(
        struct.pack(f"<{len(numbers)}f", *(scale * number for number in numbers))
        for scale in (1, 10, 100)
    )
    # A bfloat16 is the upper half of a float32.
    columns += b"".join(struct.pack("<f", number / 2)[2:] for number in numbers)
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
def test_tensors_are_read_from_every_rank(checkpoint: Path, column: Column, scale: float) -> None:
    with open_stored_tensors(checkpoint) as stored:
        assert stored.count_optimizer_steps() == 7
        assert stored.weight_dtype == torch.bfloat16
        assert [stored.find_shape(name) for name in ("layers.weight", "norm", "other")] == [
            (2, 2, 1), (3,), (),
        ]  # fmt: skip
        for layer, expected in enumerate(([1.0, 2.0], [3.0, 4.0])):
            target = torch.zeros(1, 2, 1)
            stored.read_block(column, "layers.weight", Box((layer, 0, 0), (1, 2, 1)), target)
            assert target.flatten().tolist() == [scale * number for number in expected]
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
    # Later fields are added, and an older index, as above, lacks them.
    assert json.loads((tmp_path / "index.json").read_text()) == INDEX | {"critic_steps": 0}
