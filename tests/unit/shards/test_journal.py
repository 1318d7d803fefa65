import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import ClusterError
from areal_hpc.shards.journal import JournalRecord, JournalWriter, read_journal
from tests.support.full_disk import full_disk

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
        own = [record.payload for record in records if record.kind == kind]
        assert own == [b"%d" % number * 100 for number in range(50)]
