"""A trainer reads sealed shards; anything else in their place raises one type of error."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_hpc.errors import ShardError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import SealedShard
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.verify import CheckedShards, verify_run
from areal_hpc.wire.trajectory import CallRecord, RowKind, RowRecord
from tests.support.sample_trajectories import fields, seal_in, ticket, trajectory

SHARD, NEXT_SHARD = "cell-0-000000.h5", "cell-0-000001.h5"
pytestmark = pytest.mark.timeout(60)  # a FIFO must not hold anybody up


@pytest.fixture
def shard(paths: RunPaths) -> SealedShard:
    """The first of two shards of a run."""
    first = seal_in(paths, ticket(1))
    seal_in(paths, ticket(2))
    return first


@pytest.fixture
def shards(paths: RunPaths) -> CheckedShards:
    return CheckedShards(paths.shards_dir, paths.shard_index_dir)


def read(shards: CheckedShards, *names: str) -> list[dict[str, object]]:
    """Read all rows of shards of two rows, as a batch that is read for the first time."""
    with shards.check_digests_in_background(names):
        return [fields(row) for name in names for row in shards.read_training_rows(name, [0, 1])]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True))
def test_any_flipped_bit_is_refused(paths: RunPaths, shard: SealedShard, fraction: float) -> None:
    """Metadata counts, too: a storage that changed it may have changed more."""
    position = int(shard.bytes * fraction)
    path = paths.shards_dir / shard.file
    flip(path, position)
    try:
        with pytest.raises(ShardError, match=r"digest: expected crc32:.* bytes have changed"):
            read(CheckedShards(paths.shards_dir, paths.shard_index_dir), SHARD)
    finally:
        flip(path, position)


def test_whole_shards_are_read_though_their_index_grows_and_ends_in_half_a_line(
    paths: RunPaths, shard: SealedShard, shards: CheckedShards
) -> None:
    expected = [fields(row) | {"meta": {}} for row in ticket(1)]
    assert read(shards, SHARD) == expected
    index = paths.shard_index_dir / "cell-0.jsonl"
    seal_in(paths, ticket(3))
    whole = index.read_bytes()
    index.write_bytes(whole[:-9])
    with pytest.raises(ShardError, match="the index has no line of this shard"):
        read(shards, "cell-0-000002.h5")
    index.write_bytes(whole)
    assert read(shards, NEXT_SHARD, "cell-0-000002.h5")[2]["ticket_id"] == 3


def test_a_row_that_is_not_for_training_is_refused(paths: RunPaths, shards: CheckedShards) -> None:
    record = RowRecord(session_id="s", calls=[CallRecord(id="a", reply_tokens=3)])
    rows = [trajectory(1), replace(trajectory(2), kind=RowKind.EVALUATION, record=record)]
    name = seal_in(paths, rows).file
    assert len(shards.read_training_rows(name, [0])) == 1
    with pytest.raises(ShardError, match="row 1: expected a training row, got kind evaluation"):
        shards.read_training_rows(name, [0, 1])
    with pytest.raises(ShardError, match=r"has rows 0\.\.1, got 2"):
        shards.read_training_rows(name, [2])


OTHER_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "is missing"),
    "a FIFO": (os.mkfifo, "expected a regular file, got a FIFO"),
    "a directory": (Path.mkdir, "expected a regular file, got a directory"),
    "a link out of the run": (
        lambda path: path.symlink_to("/proc/self/status"),
        "expected a regular file, got a symbolic link",
    ),
    "a link to a device": (
        lambda path: path.symlink_to("/dev/zero"),
        "expected a regular file, got a symbolic link",
    ),
    "another shard": (
        lambda path: path.hardlink_to(path.with_name(NEXT_SHARD)),
        "bytes have changed",
    ),
    "a shorter file": (lambda path: path.write_bytes(b"short"), r"size: expected \d+ bytes, got 5"),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_what_lies_in_a_shards_place_is_one_kind_of_error(
    paths: RunPaths, shard: SealedShard, shards: CheckedShards, kind: str
) -> None:
    make, message = OTHER_FILES[kind]
    path = paths.shards_dir / SHARD
    path.unlink()
    make(path)
    with pytest.raises(ShardError, match=message):
        read(shards, SHARD)
    if kind != "another shard":
        with pytest.raises(ShardError, match=r"no such|cannot be read|incomplete"):
            ShardReader(path)
    assert len(verify_run(paths).problems) == 1


@pytest.mark.parametrize("name", ["../../etc/passwd", "cell-0-000000.h5.tmp", "cell-0-000077.h5"])
def test_a_wrong_name_is_refused(shard: SealedShard, shards: CheckedShards, name: str) -> None:
    with pytest.raises(ShardError, match=r"the name of a shard|the index has no line"):
        read(shards, name)


def link_to_another_file(file: h5py.File) -> None:
    file["reward"] = h5py.ExternalLink(NEXT_SHARD, "/reward")


def link_within(file: h5py.File) -> None:
    file["reward"] = h5py.SoftLink("/temperature")


def store_elsewhere(file: h5py.File) -> None:
    file.create_dataset("reward", (2,), "<f4", external=[("elsewhere.bin", 0, 8)])


def name_the_version_in_words(file: h5py.File) -> None:
    file["reward"] = np.zeros(2, "<f4")
    file.attrs["version"] = "one"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (link_to_another_file, "reward: expected a dataset of this file, got a link"),
        (link_within, "reward: expected a dataset of this file, got a link"),
        (store_elsewhere, "reward: expected a dataset of this file, got other files"),
        (name_the_version_in_words, "incomplete shard"),
    ],
)
def test_data_of_other_files_is_refused(
    paths: RunPaths, shard: SealedShard, change: Callable[[h5py.File], None], message: str
) -> None:
    path = paths.shards_dir / SHARD
    with h5py.File(path, "r+") as file:
        del file["reward"]
        change(file)
    with pytest.raises(ShardError, match=message):
        ShardReader(path)


def test_a_damaged_heap_of_texts_holds_no_reader(paths: RunPaths, shard: SealedShard) -> None:
    path = paths.shards_dir / SHARD
    content = bytearray(path.read_bytes())
    size_at = content.index(b"GCOL") + 24  # of the heap's first object
    content[size_at : size_at + 8] = bytes(8)
    path.write_bytes(content)
    assert len(ShardReader(path).read_rows([0])) == 1


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1))
def test_a_reader_of_damaged_files_has_one_type_of_error(damage: list[tuple[float, int]]) -> None:
    """`areal-hpc shards show FILE` reads without the index: only a digest would see the rest."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        path = paths.shards_dir / seal_in(paths, ticket(1)).file
        content = bytearray(path.read_bytes())
        for fraction, value in damage:
            content[int(len(content) * fraction)] = value
        path.write_bytes(content)
        try:
            ShardReader(path).read_rows([0, 1])
        except ShardError:
            return
