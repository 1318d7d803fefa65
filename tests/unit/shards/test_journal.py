import os
import resource
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.errors import ClusterError
from areal_hpc.shards.journal import JournalRecord, JournalWriter, read_journal

RECORDS = st.lists(
    st.builds(JournalRecord, st.integers(0, 2**32 - 1), st.binary(max_size=200)), max_size=8
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node" / "cell-0.journal"


@pytest.fixture
def writer(path: Path) -> Iterator[JournalWriter]:
    opened = JournalWriter(path, sync_interval_s=0.001)
    yield opened
    opened.close()


def write(path: Path, records: list[JournalRecord]) -> None:
    writer = JournalWriter(path, sync_interval_s=10)
    for record in records:
        writer.append(record.kind, record.payload)
    writer.close()


def test_a_record_can_be_read_as_soon_as_append_returns(path: Path, writer: JournalWriter) -> None:
    writer.append(7, b"tokens")
    assert list(read_journal(path)) == [JournalRecord(7, b"tokens")]


@settings(max_examples=60)
@given(RECORDS, RECORDS)
def test_records_survive_closing_and_opening_again(
    first: list[JournalRecord], second: list[JournalRecord]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        write(path, first)
        write(path, second)
        reading = read_journal(path)
        assert list(reading) == first + second
        assert (reading.whole_bytes, reading.torn_bytes) == (path.stat().st_size, 0)


@settings(max_examples=60)
@given(RECORDS.filter(bool), st.data())
def test_a_journal_cut_anywhere_yields_its_whole_records_and_goes_on(
    records: list[JournalRecord], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        write(path, records)
        cut = data.draw(st.integers(0, path.stat().st_size))
        os.truncate(path, cut)
        reading = read_journal(path)
        kept = list(reading)
        assert kept == records[: len(kept)]
        assert reading.whole_bytes + reading.torn_bytes == cut
        after = JournalRecord(1, b"after the crash")
        write(path, [after])
        reading = read_journal(path)
        assert list(reading) == [*kept, after]
        assert reading.torn_bytes == 0


@settings(max_examples=60)
@given(RECORDS.filter(bool), st.data())
def test_no_record_with_a_flipped_bit_is_ever_returned(
    records: list[JournalRecord], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        write(path, records)
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        kept = list(read_journal(path))
        assert kept == records[: len(kept)]
        assert len(kept) < len(records)


def test_garbage_behind_the_records_is_counted_not_returned(path: Path) -> None:
    write(path, [JournalRecord(1, b"whole")])
    with path.open("ab") as stream:
        stream.write(b"AHJ1 torn")
    reading = read_journal(path)
    assert list(reading) == [JournalRecord(1, b"whole")]
    assert reading.torn_bytes == 9


def test_only_the_owner_can_read_a_journal(path: Path, writer: JournalWriter) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    writer.rotate(lambda record: True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_journal_has_one_writer_at_a_time(path: Path, writer: JournalWriter) -> None:
    with pytest.raises(ClusterError, match="another process writes this journal"):
        JournalWriter(path, sync_interval_s=0.01)
    writer.rotate(lambda record: True)
    with pytest.raises(ClusterError, match="another process writes this journal"):
        JournalWriter(path, sync_interval_s=0.01)


def test_bytes_written_is_the_size_of_the_file(path: Path, writer: JournalWriter) -> None:
    for size in (0, 1, 5000):
        writer.append(1, b"x" * size)
    assert writer.bytes_written == path.stat().st_size


def test_rotation_keeps_what_is_needed_in_order(path: Path, writer: JournalWriter) -> None:
    for number in range(6):
        writer.append(number, b"%d" % number)
    writer.rotate(lambda record: record.kind % 2 == 1)
    writer.append(9, b"later")
    assert [record.kind for record in read_journal(path)] == [1, 3, 5, 9]
    assert writer.bytes_written == path.stat().st_size
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_records_appended_during_a_rotation_are_kept(path: Path, writer: JournalWriter) -> None:
    writer.append(0, b"settled")

    def drop_and_append(record: JournalRecord) -> bool:
        writer.append(1, b"while rotating")
        return False

    writer.rotate(drop_and_append)
    assert list(read_journal(path)) == [JournalRecord(1, b"while rotating")]


def test_a_rotation_that_crashed_leaves_the_journal_and_can_be_repeated(path: Path) -> None:
    write(path, [JournalRecord(1, b"kept"), JournalRecord(2, b"dropped")])
    path.with_name(path.name + ".new").write_bytes(b"half a rotation")
    writer = JournalWriter(path, sync_interval_s=0.01)
    assert len(list(read_journal(path))) == 2
    writer.rotate(lambda record: record.kind == 1)
    writer.close()
    assert list(read_journal(path)) == [JournalRecord(1, b"kept")]


def test_a_full_disk_leaves_the_journal_whole(path: Path, writer: JournalWriter) -> None:
    writer.append(1, b"whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # SIGXFSZ is ignored by Python
    try:
        with pytest.raises(ClusterError, match="cannot write the journal"):
            writer.append(2, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.append(3, b"room again")
    reading = read_journal(path)
    assert [record.kind for record in reading] == [1, 3]
    assert reading.torn_bytes == 0


def test_threads_never_mix_their_records(path: Path, writer: JournalWriter) -> None:
    def append_many(kind: int) -> None:
        for number in range(50):
            writer.append(kind, b"%d" % number * 100)

    threads = [threading.Thread(target=append_many, args=(kind,)) for kind in range(4)]
    for thread in threads:
        thread.start()
    writer.rotate(lambda record: True)
    for thread in threads:
        thread.join()
    records = list(read_journal(path))
    for kind in range(4):
        own = [record.payload for record in records if record.kind == kind]
        assert own == [b"%d" % number * 100 for number in range(50)]


def test_closing_twice_is_harmless(path: Path) -> None:
    writer = JournalWriter(path, sync_interval_s=60)
    writer.append(1, b"x")
    writer.close()
    writer.close()
    assert len(list(read_journal(path))) == 1


@pytest.mark.parametrize("kind", [-1, 2**32])
def test_a_kind_beyond_32_bits_is_refused(writer: JournalWriter, kind: int) -> None:
    with pytest.raises(ValueError, match="kind of 32 bits"):
        writer.append(kind, b"")


def test_a_journal_that_cannot_be_made_is_a_cluster_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match=r"shards\.journal_dir"):
        JournalWriter(tmp_path / "file" / "journal", sync_interval_s=0.01)
