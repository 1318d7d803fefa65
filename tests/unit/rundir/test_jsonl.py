"""Files of JSON lines, torn by crashes and full disks."""

import logging
import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.rundir.events import EventLog
from areal_hpc.rundir.jsonl import append_line, read_lines

FIRST, SECOND = {"node": "n01", "step": 1}, {"node": "n02", "step": 2}


def append_on_a_full_disk(path: Path, limit_bytes: int) -> bool:
    """Append a line in a process that may write `limit_bytes` of the file; False if it refused."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        try:
            append_line(path, SECOND)
        except OSError:
            os._exit(7)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_line_that_a_full_disk_cut_short_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, FIRST)
    whole_bytes = path.stat().st_size
    assert not append_on_a_full_disk(path, whole_bytes + 10)
    assert path.stat().st_size == whole_bytes + 10
    assert read_lines(path) == [FIRST], "a fragment at the end is silently left out"
    assert not caplog.records
    append_line(path, SECOND)
    assert read_lines(path) == [FIRST, SECOND]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{path} line 2 cannot be read and is left out" in record.message
    assert read_lines(path) == [FIRST, SECOND]
    assert len(caplog.records) == 1, "a line is named once, however often its file is read"


def test_events_are_appended_behind_a_fragment(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time":1.5,"role":"cell-0","eve')
    EventLog(path, "trainer").record("weights_published", version="1.2")
    assert [line["event"] for line in read_lines(path)] == ["weights_published"]


def test_a_whole_line_without_its_newline_counts_and_stays_apart_from_the_next(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"node":"n01","step":1}')
    assert read_lines(path) == [FIRST]
    append_line(path, SECOND)
    assert read_lines(path) == [FIRST, SECOND]


def test_lines_of_an_earlier_version_that_were_joined_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"node":"n0{"node":"n03"}\n\x00\x00\xff\n[1]\n\n{"node":"n01","step":1}\n')
    assert read_lines(path) == [FIRST]


def test_half_of_a_surrogate_pair_is_no_reason_not_to_write(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "cell-0").record("episode_failed", reason="cut \ud83d emoji")
    assert [line["reason"] for line in read_lines(path)] == ["cut ? emoji"]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "lines.jsonl") == []


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
    assert [line["step"] for line in read_lines(path)] == [*lines[:-1], -1]
