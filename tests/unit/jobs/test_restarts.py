"""The starts of a job are numbered; older ones and their processes learn that they are over."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.jobs import restarts, time_limit
from areal_hpc.rundir.paths import JobPaths


def test_other_tasks_find_the_start_that_the_first_one_took(tmp_path: Path) -> None:
    restarts.take_next_restart(tmp_path / "restarts", "7.0", "n01", "")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(restarts.wait_for_restart, tmp_path / "restarts", "7.1", "n02", 60.0)
        time.sleep(0.1)
        assert not waiting.done(), "an earlier start is not this one"
        taken = restarts.take_next_restart(tmp_path / "restarts", "7.1", "n01", "10.0.0.1:5")
        assert waiting.result(60.0) == taken
    assert taken.number == 2


def test_a_node_that_does_not_share_the_storage_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match="n02 does not see the restart file of the first task after 0 s"
    ):
        restarts.wait_for_restart(tmp_path / "starts", "7.0", "n02", 0.1)


def test_the_first_task_learns_which_nodes_do_not_join(tmp_path: Path) -> None:
    start = restarts.take_next_restart(tmp_path, "7.0", "n01", "")
    restarts.report_node(tmp_path, start, 2)
    assert restarts.await_nodes(tmp_path, start, 4, 0.1) == [1, 3]
    restarts.report_node(tmp_path, start, 1)
    restarts.report_node(tmp_path, start, 3)
    assert restarts.await_nodes(tmp_path, start, 4, 0.1) == []
    assert [path.name for path in tmp_path.iterdir()] == ["0001"]


def test_a_start_is_over_once_there_is_a_later_one(tmp_path: Path) -> None:
    first = restarts.take_next_restart(tmp_path, "7.0", "n01", "")
    assert not restarts.is_superseded(tmp_path, first)
    second = restarts.take_next_restart(tmp_path, "8.0", "n02", "")
    assert restarts.is_superseded(tmp_path, first)
    assert not restarts.is_superseded(tmp_path, second)


def test_processes_read_until_when_they_may_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert restarts.read_own_stop_notice() is None, "without a supervisor under Slurm"
    path = restarts.stop_note_path(tmp_path, restarts.take_next_restart(tmp_path, "7.0", "n01", ""))
    monkeypatch.setenv(restarts.STOP_NOTICE_VARIABLE, str(path))
    assert restarts.read_own_stop_notice() is None
    note = restarts.StopNotice("close to the time limit", 143, 1234.5)
    restarts.write_stop_note(path, note)
    assert restarts.read_own_stop_notice() == note


def test_slurm_tells_the_end_and_a_process_how_long_its_last_save_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobPaths(tmp_path)
    assert time_limit.read_end_time({"SLURM_JOB_END_TIME": "1795318302"}) == 1795318302.0
    assert time_limit.read_checkpoint_time_s(job) == 0.0
    monkeypatch.setenv(time_limit.CHECKPOINT_TIME_VARIABLE, str(job.checkpoint_time))
    time_limit.record_checkpoint_time(21.5)
    assert time_limit.read_checkpoint_time_s(job) == 21.5
