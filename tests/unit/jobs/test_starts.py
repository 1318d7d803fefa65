"""The starts of a job are numbered; older ones and their processes learn that they are over."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_hpc.jobs import starts
from areal_hpc.rundir.paths import JobPaths
from tests.support.deadlines import scaled


def test_other_tasks_find_the_first_ones_start_and_earlier_ones_are_over(tmp_path: Path) -> None:
    first = starts.claim_next_start(tmp_path / "starts", "7.0", "n01", "")
    assert not starts.is_superseded(tmp_path / "starts", first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            starts.await_start,
            tmp_path / "starts",
            "7.1",
            "n02",
            scaled(60.0),
        )
        time.sleep(0.1)
        assert not waiting.done(), "an earlier start is not this one"
        taken = starts.claim_next_start(tmp_path / "starts", "7.1", "n01", "10.0.0.1:5")
        assert waiting.result(scaled(60.0)) == taken
    assert taken.number == 2
    superseded = [starts.is_superseded(tmp_path / "starts", one) for one in (first, taken)]
    assert superseded == [True, False]


def test_processes_read_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert starts.read_own_stop_note() is None, "without a supervisor under Slurm"
    path = starts.get_stop_note_path(tmp_path, starts.claim_next_start(tmp_path, "7.0", "n01", ""))
    monkeypatch.setenv(starts.STOP_NOTE_VARIABLE, str(path))
    assert starts.read_own_stop_note() is None
    deadline = starts.StopDeadline(5000.0)
    assert 4000 < deadline.get_left_s() <= 5000, "until there is a note"
    note = starts.StopNote("close to the time limit", 143, 60_000.0)
    starts.write_stop_note(path, note)
    assert starts.read_own_stop_note() == note
    assert 50_000 < deadline.get_left_s() <= 60_000
    time.sleep(0.1)
    assert deadline.get_left_s() <= 60_000 - 0.1, "a note is counted from once"


def test_slurm_tells_the_end_and_a_process_how_long_its_last_save_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobPaths(tmp_path)
    assert starts.find_end_time({"SLURM_JOB_END_TIME": "1795318302"}) == 1795318302.0
    assert starts.read_checkpoint_duration_s(job) == 0.0
    monkeypatch.setenv(starts.CHECKPOINT_DURATION_FILE_VARIABLE, str(job.checkpoint_duration))
    starts.record_checkpoint_duration(21.5)
    assert starts.read_checkpoint_duration_s(job) == 21.5
    (tmp_path / "no_folder").touch()
    monkeypatch.setenv(
        starts.CHECKPOINT_DURATION_FILE_VARIABLE, str(tmp_path / "no_folder" / "time")
    )
    starts.record_checkpoint_duration(30.0)  # the storage refuses, which is told in the log
