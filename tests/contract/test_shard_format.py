"""Format v1 does not move: the golden file opens, and today's writer still writes its like."""

import re
from pathlib import Path
from typing import Any

import h5py
import pytest

from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.schema import ALIGNMENT_BYTES, DATASETS
from areal_hpc.shards.verify import digest_file
from areal_hpc.shards.writer import write_sealed_shard
from tests.golden.make_shard_v1 import GOLDEN, WRITER, golden_rows
from tests.support.sample_trajectories import fields

GOLDEN_DIGEST = (13320, "crc32:f4939ce6")
DOCUMENT = Path(__file__).parents[2] / "docs" / "shard-format-v1.md"


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The golden rows as today's writer seals them."""
    return tmp_path / write_sealed_shard(golden_rows(), tmp_path, tmp_path / "index", WRITER).file


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
    assert digest_file(GOLDEN) == GOLDEN_DIGEST


def test_the_golden_file_reads_as_the_rows_it_was_written_from() -> None:
    reader = ShardReader(GOLDEN)
    rows = reader.read_rows(range(reader.num_rows))
    expected = [fields(row) for row in golden_rows()]
    for row in expected:  # rewards and temperatures are stored as float32
        row["reward"] = pytest.approx(row["reward"], rel=1e-7)
        row["temperature"] = pytest.approx(row["temperature"], rel=1e-7)
    assert [fields(row) for row in rows] == expected
    with h5py.File(GOLDEN, "r") as file:
        assert (file.attrs["writer"], file.attrs["created"][:4]) == (WRITER, "2026")


def test_the_writer_still_writes_the_like_of_the_golden_file(fresh: Path) -> None:
    assert structure(fresh) == structure(GOLDEN)


def test_the_schema_lists_exactly_what_is_written(fresh: Path) -> None:
    with h5py.File(fresh, "r") as file:
        assert set(file) == {dataset.name for dataset in DATASETS}
        assert set(file.attrs) == {"format", "version", "writer", "created"}
        for dataset in DATASETS:
            assert file[dataset.name].dtype == dataset.dtype
            assert file[dataset.name].id.get_offset() % ALIGNMENT_BYTES == 0


def test_the_document_has_the_table_of_the_schema() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([iuf]\d) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(dataset.name, dataset.dtype.str[1:]) for dataset in DATASETS]
