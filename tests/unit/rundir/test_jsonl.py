"""Files of JSON lines torn by crashes, and errors of storage that are passed over."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.files import StorageErrorTolerance
from areal_hpc.rundir.jsonl import append_line, read_readable_records
from areal_hpc.rundir.telemetry.events import EventLog
from tests.support.full_disk import full_disk

FIRST, SECOND = {"node": "n01", "step": 1}, {"node": "n02", "step": 2}


def test_a_full_disk_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, FIRST)
    whole_bytes = path.stat().st_size
    with full_disk(whole_bytes + 10), pytest.raises(OSError, match="took 10 of 24 bytes"):
        append_line(path, SECOND)
    assert path.stat().st_size == whole_bytes + 10
    assert read_readable_records(path) == [FIRST], "a fragment at the end is silently left out"
    assert not caplog.records
    append_line(path, SECOND)
    assert read_readable_records(path) == [FIRST, SECOND]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{path} line 2 cannot be read and is left out" in record.message
    assert read_readable_records(path) == [FIRST, SECOND]
    assert len(caplog.records) == 1, "a line is named once, however often its file is read"


def test_joined_lines_are_left_out_and_one_without_a_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"node":"n0{"node":"n03"}\n\x00\x00\xff\n[1]\n\n{"node":"n01","step":1}')
    assert read_readable_records(path) == [FIRST]
    append_line(path, SECOND)
    assert read_readable_records(path) == [FIRST, SECOND]


def test_half_a_surrogate_pair_after_a_fragment_is_still_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_readable_records(path) == []
    path.write_bytes(b'{"time":1.5,"role":"cell-0","eve')
    EventLog(path, "cell-0").record("episode_failed", reason="cut \ud83d emoji")
    assert [(line["event"], line["reason"]) for line in read_readable_records(path)] == [
        ("episode_failed", "cut ? emoji")
    ]


@given(lines=st.lists(st.integers(0, 10**6), min_size=1), cut=st.data())
def test_whatever_is_cut_off_only_the_last_line_is_lost(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], cut: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "lines.jsonl"
    for number in lines:
        append_line(path, {"step": number})
    content = path.read_bytes()
    last_bytes = len(content) - 1 - content.rfind(b"\n", 0, len(content) - 1)
    path.write_bytes(content[: -cut.draw(st.integers(2, last_bytes))])
    append_line(path, {"step": -1}, sync=True)
    assert [line["step"] for line in read_readable_records(path)] == [*lines[:-1], -1]


LIMIT_S = 60.0


class Storage:
    """Storage that answers with an error or not, at a time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.tolerance = StorageErrorTolerance(LIMIT_S, read_s=lambda: self.now_s)

    def look(self, error: OSError | None = None, after_s: float = 0.0) -> bool:
        """Return whether the look succeeded."""
        self.now_s += after_s
        succeeded = False
        with self.tolerance.tolerate():
            if error is not None:
                raise error
            succeeded = True
        return succeeded


@pytest.fixture
def storage() -> Storage:
    return Storage()


def stale() -> OSError:
    return OSError(errno.ESTALE, "Stale file handle", "/run/events.jsonl")


def test_an_error_now_and_then_is_passed_over_for_ever(storage: Storage) -> None:
    for _ in range(10):
        assert not storage.look(stale(), after_s=LIMIT_S)
        assert storage.look()


def test_an_error_after_a_long_hang_is_the_first_one(storage: Storage) -> None:
    assert storage.look()
    assert not storage.look(stale(), after_s=10 * LIMIT_S)


def test_storage_that_only_fails_is_lost_after_a_while(storage: Storage) -> None:
    assert not storage.look(stale())
    assert not storage.look(stale(), after_s=LIMIT_S)
    with pytest.raises(ClusterError, match=r"for 60 s.*Stale") as lost:
        storage.look(stale(), after_s=1.0)
    assert lost.value.problems[0].key == "/run/events.jsonl"


@pytest.mark.parametrize("make_error", [BrokenPipeError, lambda: ValueError("no error of storage")])
def test_other_errors_are_raised(storage: Storage, make_error: Callable[[], Exception]) -> None:
    with pytest.raises((BrokenPipeError, ValueError)), storage.tolerance.tolerate():
        raise make_error()
