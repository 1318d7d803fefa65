import dataclasses
import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_hpc.errors import ClusterError, ShardError
from areal_hpc.rundir.files import write_all
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import locate_tickets, read_index
from areal_hpc.shards.journal import JournalRecord, JournalWriter, read_journal
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.verify import verify_run
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.trajectory import SamplingMask, TrajectoryRow
from tests.support.full_disk import full_disk
from tests.support.sample_trajectories import fields, seal_in, ticket, trajectories, trajectory


@pytest.fixture
def ten_rows(paths: RunPaths) -> ShardReader:
    """Row n has n tokens."""
    return reader_of(paths, [trajectory(number, tokens=number) for number in range(10)])


def reader_of(paths: RunPaths, rows: list[TrajectoryRow]) -> ShardReader:
    return ShardReader(paths.shards_dir / seal_in(paths, rows).file)


@given(st.lists(trajectories(), min_size=1, max_size=5))
def test_what_is_sealed_is_what_is_read(rows: list[TrajectoryRow]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        reader = reader_of(paths, rows)
        read = reader.read_rows(range(len(rows)))
        assert [fields(row) for row in read] == [fields(row) for row in rows]
        (shard,) = read_index(paths.shard_index_dir)
        assert (reader.num_rows, reader.num_tokens) == (shard.rows, shard.tokens)


def test_sampling_masks_are_read_for_whichever_rows_are_asked_for(paths: RunPaths) -> None:
    rows = [trajectory(number, tokens=6) for number in range(5)]
    for number in (1, 3):
        ids = [[], [], [], [1003 + 1000 * (number - 1), 7], [], [1005 + 1000 * (number - 1)]]
        mask = SamplingMask(
            np.array(list(map(len, ids)), np.uint16),
            np.array([id_ for row_ids in ids for id_ in row_ids], np.int32),
        )
        rows[number] = dataclasses.replace(rows[number], sampling_mask=mask)
    reader = reader_of(paths, rows)
    for chosen in ([3], [4, 3, 0], [1, 2, 3], [0]):
        for number, row in zip(chosen, reader.read_rows(chosen), strict=True):
            if number not in (1, 3):
                assert row.sampling_mask is None
                continue
            assert row.sampling_mask is not None
            assert row.sampling_mask.counts_T.tolist() == [0, 0, 0, 2, 0, 1]
            assert row.sampling_mask.ids[1] == 7
            assert row.sampling_mask.ids[2] == 1000 * number + 5


@pytest.mark.parametrize(
    ("counts", "ids", "message"),
    [
        ([0, 0, 0, 1, 0], [3], "of 6 places and 1 tokens, got 5 and 1"),
        ([0, 0, 0, 2, 0, 0], [3], "of 6 places and 2 tokens, got 6 and 1"),
        ([0, 0, 0, 1, 0, 0], [9], "every sampled token in its sampling mask"),
        ([0, 0, 0, 2, 0, 0], [3, -1], "token ids from 0"),
    ],
)
def test_a_sampling_mask_that_does_not_fit_is_refused(
    paths: RunPaths, counts: list[int], ids: list[int], message: str
) -> None:
    mask = SamplingMask(np.array(counts, np.uint16), np.array(ids, np.int32))
    row = dataclasses.replace(trajectory(0, tokens=6), sampling_mask=mask)
    with pytest.raises(ValueError, match=message):
        seal_in(paths, [row])


def test_a_shard_that_shrinks_under_its_reader_is_an_error(paths: RunPaths) -> None:
    reader = reader_of(paths, [trajectory(number, tokens=5000) for number in range(4)])
    os.truncate(reader.path, reader.path.stat().st_size // 2)
    with pytest.raises(ShardError, match="cannot be read: the file is"):
        reader.read_rows([0, 1, 2, 3])


@given(st.lists(st.integers(0, 9), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_choice_of_rows_is_read_as_sealed(ten_rows: ShardReader, rows: list[int]) -> None:
    read = ten_rows.read_rows(rows)
    assert [fields(row) for row in read] == [
        fields(trajectory(number, tokens=number)) for number in rows
    ]


def test_tickets_are_found_by_shard_and_rows_in_their_first_copy(paths: RunPaths) -> None:
    assert read_index(paths.shard_index_dir) == read_index(paths.shard_index_dir, "cell-7") == []
    first = seal_in(paths, ticket(4) + ticket(9, n_samples=3))
    second = seal_in(paths, ticket(5), "cell-1")
    seal_in(paths, ticket(4))
    places = locate_tickets(read_index(paths.shard_index_dir))
    entry = places[TicketRef(9, 1)]
    assert (entry.shard, entry.rows, entry.rewards) == (first.file, [2, 3, 4], [0.0, 1.0, 2.0])
    assert places[TicketRef(5, 1)].shard == second.file
    assert places[TicketRef(4, 1)].shard == first.file
    assert TicketRef(4, 0) not in places


def test_the_index_tells_rewards_and_the_oldest_sampling_weights(paths: RunPaths) -> None:
    old, new = trajectory(3), trajectory(3, 1)
    new.versions_T[-1] += 4  # an update came in between
    old.versions_T[-2] -= 2
    reader = reader_of(paths, [new, old, trajectory(5, reward=0.1)])
    (shard,) = read_index(paths.shard_index_dir)
    rewards = [reward for ticket in shard.tickets for reward in ticket.rewards]
    assert rewards[-1] == 0.1  # where the column has its neighbor in single precision
    assert np.array(rewards, np.float32).tolist() == reader.read_column("reward").tolist()
    assert [ticket.oldest_version for ticket in shard.tickets] == [(1 << 32) + 1, (1 << 32) + 5]


def test_every_writer_numbers_its_own_shards_and_uses_no_number_twice(paths: RunPaths) -> None:
    writers = ("cell-0", "cell-1", "cell-0")
    names = [seal_in(paths, [trajectory()], writer).file for writer in writers]
    assert names == ["cell-0-000000.h5", "cell-1-000000.h5", "cell-0-000001.h5"]
    (paths.shards_dir / "cell-0-000001.h5").unlink()
    (paths.shards_dir / "cell-0-000002.h5.tmp").touch()
    assert seal_in(paths, [trajectory()]).file == "cell-0-000003.h5"


def test_index_and_numbers_go_on_behind_long_lines_and_half_ones(paths: RunPaths) -> None:
    many = [trajectory(number, tokens=1) for number in range(4000)]
    shards = [seal_in(paths, rows) for rows in (ticket(0), many, ticket(1), many)]
    path = paths.shard_index_dir / "cell-0.jsonl"
    assert path.stat().st_size > 400_000
    with path.open("ab") as stream:
        stream.write(b'{"file":"cell-0-000009.h5","byt')
    assert read_index(paths.shard_index_dir) == shards
    for shard in shards:
        (paths.shards_dir / shard.file).unlink()
    shards.append(seal_in(paths, ticket(2)))
    assert shards[-1].file == "cell-0-000004.h5"
    assert read_index(paths.shard_index_dir) == shards


def test_two_live_writers_of_one_name_never_overwrite_each_other(paths: RunPaths) -> None:
    with ThreadPoolExecutor(4) as pool:
        shards = list(pool.map(lambda number: seal_in(paths, ticket(number)), range(12)))
    assert len({shard.file for shard in shards}) == 12
    assert len(read_index(paths.shard_index_dir)) == 12
    assert verify_run(paths).problems == []


def test_what_is_unsound_empty_or_badly_named_is_refused_unwritten(paths: RunPaths) -> None:
    """`tests/unit/test_wire.py` has all that makes a row unsound."""
    unsound = dataclasses.replace(trajectory(3), reward=float("nan"))
    with pytest.raises(ValueError, match=r"row 1, of ticket 3: expected .*, got nan"):
        seal_in(paths, [trajectory(), unsound])
    for rows, writer, message in (
        ([], "cell-0", "at least one trajectory"),
        ([trajectory()], "../cell-0", "a writer is named by"),
    ):
        with pytest.raises(ValueError, match=message):
            seal_in(paths, rows, writer)
    assert not paths.shards_dir.exists()


def test_storage_that_refuses_is_a_cluster_error_and_leaves_nothing(paths: RunPaths) -> None:
    for folder in (paths.shard_index_dir, paths.shards_dir):
        folder.write_text("a file where a directory belongs")
        with pytest.raises(ClusterError, match="cannot seal 1 trajectories"):
            seal_in(paths, [trajectory()])
        folder.unlink()


@given(st.floats(0, 1, exclude_max=True))
def test_a_shard_cut_short_anywhere_is_an_error(fraction: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        path = reader_of(paths, ticket(1)).path
        os.truncate(path, int(path.stat().st_size * fraction))
        with pytest.raises(ShardError, match=r"incomplete shard|cut short"):
            ShardReader(path)


def test_a_later_version_is_refused_and_unknown_names_are_not(paths: RunPaths) -> None:
    path = reader_of(paths, [trajectory()]).path
    with h5py.File(path, "r+") as file:
        file["added_later"] = np.arange(3)
        file.attrs["also_later"] = 1
    assert ShardReader(path).num_rows == 1
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 3
    with pytest.raises(ShardError, match="expected version 2, got"):
        ShardReader(path)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("reward", np.zeros(2, "<f8"), "reward: expected 1-D contiguous <f4"),
        ("reward", np.zeros((2, 1), "<f4"), "reward: expected 1-D contiguous <f4"),
        ("reward", np.zeros(3, "<f4"), "reward has 3 elements, expected 2"),
        ("offsets", np.array([0, 13, 12]), "does not rise from 0 to 12"),
        ("offsets", np.array([0, 6, 11]), "does not rise from 0 to 12"),
        ("meta_offsets", np.array([0, 1, 1]), "meta_offsets does not rise"),
    ],
)
def test_columns_that_contradict_one_another_are_an_error(
    paths: RunPaths, name: str, content: np.ndarray, complaint: str
) -> None:
    path = reader_of(paths, ticket(1)).path
    with h5py.File(path, "r+") as file:
        del file[name]
        file[name] = content
    with pytest.raises(ShardError, match=complaint):
        ShardReader(path)


def test_buffers_of_any_type_lie_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    buffers: list[Any] = [b"ab", np.array([], "<i4"), np.array([1, 2], "<i4"), memoryview(b"c")]
    assert write_all(descriptor, buffers) == 11
    assert write_all(descriptor, [b"X"] * 3000, offset=20) == 3000
    os.close(descriptor)
    start = b"ab\x01\0\0\0\x02\0\0\0c"
    assert path.read_bytes() == start.ljust(20, b"\0") + b"X" * 3000


def test_a_write_that_the_kernel_shortens_goes_on_where_it_stopped() -> None:
    # Linux takes less than 2 GiB at a time. Zeros that nobody touches need no memory.
    most_bytes = 0x7FFFF000
    content = np.zeros(most_bytes + 12345, np.uint8)
    descriptor = os.open("/dev/null", os.O_WRONLY)
    assert os.writev(descriptor, [content.data]) == most_bytes
    assert write_all(descriptor, [b"head", content, b"tail"]) == len(content) + 8
    os.close(descriptor)


def test_what_does_not_fit_is_an_error_even_when_some_of_it_did(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        write_all(descriptor, [b"x" * 60, b"y" * 60])
    os.close(descriptor)
    assert path.stat().st_size == 100


RECORDS = st.lists(
    st.builds(JournalRecord, st.integers(0, 2**32 - 1), st.binary(max_size=200)), max_size=8
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node" / "cell-0.journal"


@pytest.fixture
def writer(path: Path) -> Iterator[JournalWriter]:
    path.parent.mkdir()
    path.with_name(path.name + ".new").write_bytes(b"half a rotation that crashed")
    opened = JournalWriter(path, sync_interval_s=0.001)
    yield opened
    opened.close()


def write(path: Path, records: list[JournalRecord]) -> None:
    writer = JournalWriter(path, sync_interval_s=10)
    for record in records:
        writer.append(record.kind, record.payload)
    for _ in range(2):  # the second time is harmless
        writer.close()


def read(path: Path) -> list[JournalRecord]:
    return list(read_journal(path))


@given(RECORDS.filter(bool), RECORDS, st.data())
def test_a_journal_cut_anywhere_yields_its_whole_records_and_goes_on(
    records: list[JournalRecord], more: list[JournalRecord], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        write(path, records)
        assert read(path) == records
        cut = data.draw(st.integers(0, path.stat().st_size))
        os.truncate(path, cut)
        kept = read(path)
        whole_bytes = sum(record.size_bytes for record in kept)
        assert kept == records[: len(kept)]
        assert whole_bytes <= cut
        assert len(kept) == len(records) or cut < whole_bytes + records[len(kept)].size_bytes
        write(path, more)
        assert read(path) == kept + more
        assert path.stat().st_size == sum(record.size_bytes for record in kept + more)


@given(RECORDS.filter(bool), st.data())
def test_flipped_bits_lose_the_record(records: list[JournalRecord], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        write(path, records)
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        kept = read(path)
        assert kept == records[: len(kept)]
        assert len(kept) < len(records)


def test_a_journal_has_one_owner_and_one_writer(path: Path, writer: JournalWriter) -> None:
    for _ in range(2):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ClusterError, match="another process writes this journal"):
            JournalWriter(path, sync_interval_s=0.01)
        writer.compact(lambda record: True)


def test_rotation_keeps_what_is_needed_in_order(path: Path, writer: JournalWriter) -> None:
    for number in range(6):
        writer.append(number, b"%d" % number)
    writer.compact(lambda record: record.kind % 2 == 1)
    writer.append(9, b"later")
    assert [record.kind for record in read(path)] == [1, 3, 5, 9]
    assert writer.journal_size_bytes == path.stat().st_size
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_records_appended_during_a_rotation_are_kept(path: Path, writer: JournalWriter) -> None:
    writer.append(0, b"settled")

    def drop_and_append(record: JournalRecord) -> bool:
        writer.append(1, b"while rotating")
        return False

    writer.compact(drop_and_append)
    assert read(path) == [JournalRecord(1, b"while rotating")]


def test_a_full_disk_leaves_the_journal_whole(path: Path, writer: JournalWriter) -> None:
    writer.append(1, b"whole")
    with full_disk(1000), pytest.raises(ClusterError, match="cannot write the journal"):
        writer.append(2, b"x" * 5000)
    writer.append(3, b"room again")
    assert [record.kind for record in read(path)] == [1, 3]
    assert writer.journal_size_bytes == path.stat().st_size


def test_threads_never_mix_their_records(path: Path, writer: JournalWriter) -> None:
    def append_many(kind: int) -> None:
        for number in range(50):
            writer.append(kind, b"%d" % number * 100)

    with ThreadPoolExecutor(4) as pool:
        appended = pool.map(append_many, range(4))
        writer.compact(lambda record: True)
    assert [*appended] == [None] * 4
    records = read(path)
    for kind in range(4):
        payloads = [record.payload for record in records if record.kind == kind]
        assert payloads == [b"%d" % number * 100 for number in range(50)]
