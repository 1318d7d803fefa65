"""The shard format does not move: the golden file opens, and the writer writes its like."""

import json
from pathlib import Path
from typing import Any

import h5py
import msgspec
import pytest

from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.schema import ALIGNMENT_BYTES, ALWAYS_WRITTEN_DATASETS
from areal_hpc.shards.verify import measure_file
from areal_hpc.shards.writer import write_sealed_shard
from tests.support.environments import CHECKOUT
from tests.support.sample_trajectories import fields

GOLDEN = CHECKOUT / "tests" / "golden" / "shard_v2.h5"
"""Never made anew: old files must open forever. What it holds stands beside it."""
EXPECTED = json.loads(GOLDEN.with_suffix(".json").read_bytes())


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The golden rows as today's writer seals them."""
    rows = ShardReader(GOLDEN).read_rows(range(len(EXPECTED)))
    return tmp_path / write_sealed_shard(rows, tmp_path, tmp_path / "index", "golden").file


def structure(path: Path) -> dict[str, Any]:
    """What HDF5 says about a shard, apart from where things lie and when it was made."""
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
                dataset[:].tolist(),
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
