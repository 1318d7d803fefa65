"""Requeue of a job: the outcome of its tasks, the request to Slurm, and the count of starts."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from areal_hpc.jobs import requeue, starts
from areal_hpc.jobs.requeue import StartProgressTracker, build_exclude_list, requeue_own_job
from areal_hpc.jobs.restarts import TIME_LIMIT_REASON as LIMIT
from areal_hpc.jobs.restarts import FailuresWithoutProgress, decide_restart, find_crash_error
from areal_hpc.rundir.jobs import (
    EXCLUDED_NODE_LIFETIME_S,
    STOPPED_EXIT_CODE,
    ExcludedNode,
    TaskExit,
    add_excluded_node,
    list_unexpired_excluded_nodes,
)
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import JobPaths, RunPaths
from tests.support.deadlines import scaled
from tests.support.scripted_slurm import ScriptedSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("areal_hpc.jobs.requeue.RETRY_PAUSE_S", 0.0)
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.state = "RUNNING"
    return slurm


@pytest.mark.parametrize(
    ("action", "result", "refusals"),
    [
        ("requeue) echo PENDING > $STATE", "requeued", 0),
        ("requeue) echo PENDING > $STATE; echo Socket timed out >&2; exit 1", "ended by Slurm", 0),
        ("requeue) echo Requested operation is presently disabled >&2; exit 1", "not requeued", 1),
    ],
    ids=["taken", "taken without an answer", "refused"],
)
def test_a_job_asks_for_another_start_until_slurm_has_answered(
    slurm: ScriptedSlurm, paths: RunPaths, action: str, result: str, refusals: int
) -> None:
    """The list of excluded nodes cannot be read, as on a storage without an answer."""
    slurm.answer_about_jobs(action)
    paths.excluded_nodes.mkdir(parents=True)
    lines: list[str] = []
    give_up_at = time.monotonic() + scaled(60.0)
    assert requeue_own_job(paths, "", give_up_at, lines.append) == result
    assert (len(lines), slurm.list_calls("scontrol requeue")) == (refusals, ["scontrol requeue 7"])


def test_uncounted_crashes_end_the_job(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would bound the job's starts if a full disk kept crashes uncounted."""
    job, crash = paths.job("trainer"), [TaskExit(1, "trainer")]
    waited_s: list[float] = []
    monkeypatch.setattr("areal_hpc.jobs.requeue.time.sleep", waited_s.append)

    def count(outcomes: list[TaskExit], error: int, *, preempted: bool = False) -> str:
        def refuse(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(requeue, "write_atomic", refuse)
        waited_s.clear()
        tracker = StartProgressTracker(job, "")
        counts = tracker.update_failure_counts(outcomes, waits_for_room=not preempted)
        return decide_restart(outcomes, counts)

    assert count(crash, errno.ENOSPC) == "fail"
    assert waited_s == [60.0, 120.0, 240.0]
    assert count(crash, errno.ENOSPC, preempted=True) == "fail"
    assert waited_s == []
    assert count(crash, errno.EROFS) == "restart", "another node may see the storage"
    assert waited_s == []
    assert count([TaskExit(78, "trainer")], errno.ENOSPC) == "fail"
    assert waited_s == []
    assert count([TaskExit(STOPPED_EXIT_CODE, "trainer")], errno.ENOSPC) == "restart"
    assert waited_s == [], "a job that is preempted has no time"


def test_counts_that_cannot_be_read_count_as_none(paths: RunPaths) -> None:
    job = paths.job("trainer")
    crash = [TaskExit(1, "trainer")]
    job.failure_count.parent.mkdir(parents=True)
    job.failure_count.write_text("half a numb")
    assert StartProgressTracker(job, "").update_failure_counts(crash) == FailuresWithoutProgress(1)
    assert StartProgressTracker(job, "").update_failure_counts(crash) == FailuresWithoutProgress(2)


def test_a_failed_node_is_excluded_for_a_day_and_the_recipes_own_for_good(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    path = paths.excluded_nodes
    path.parent.mkdir()
    exclude = partial(build_exclude_list, paths, "n[01-02]")
    assert exclude("n[01-02]") == "n[01-02]"
    long_ago = time.time() - EXCLUDED_NODE_LIFETIME_S - 1
    for node in ("n02", "n05"):
        append_line(path, ExcludedNode(node, "no GPU", long_ago))
    add_excluded_node(path, "n07", "no storage", "9")
    assert list_unexpired_excluded_nodes(path) == ["n07"]
    assert exclude("n[01-02],n05,n09") == "n01,n02,n09,n07"
    add_excluded_node(path, "n05", "no GPU", "12")
    assert exclude("n[01-02],n05") == "n[01-02],n05,n07", "it failed again"


DONE, STOPPED, CRASHED = TaskExit(0), TaskExit(STOPPED_EXIT_CODE), TaskExit(139, "trainer")
LET_DOWN, MISTAKEN = TaskExit(75, "ledger"), TaskExit(78, "trainer")
AGENT_FAILED = TaskExit(70, "trainer", "the agent failed", "/x.log", says_why=True)
IDLE = TaskExit(79, "driver")
BAD_NODE = TaskExit(75, "probe", faulty_node="n07")


@pytest.mark.parametrize(
    ("outcomes", "failures", "decision"),
    [
        ([DONE, DONE], 0, "done"),
        ([STOPPED, DONE], 0, "restart"),
        ([STOPPED], 9, "restart"),
        ([CRASHED, STOPPED], 1, "restart"),
        ([CRASHED, STOPPED], 2, "fail"),
        ([LET_DOWN], 2, "restart"),
        ([LET_DOWN], 3, "fail"),
        ([LET_DOWN, CRASHED], 2, "fail"),
        ([MISTAKEN, STOPPED], 0, "fail"),
        ([AGENT_FAILED, STOPPED], 0, "fail"),
        ([BAD_NODE, STOPPED], 9, "restart"),
        ([IDLE, STOPPED], 0, "idle"),
        ([IDLE, CRASHED], 1, "restart"),
    ],
)
def test_jobs_restart_if_useful(outcomes: list[TaskExit], failures: int, decision: str) -> None:
    assert decide_restart(outcomes, FailuresWithoutProgress(failures)) == decision


def test_an_error_of_the_agent_or_the_recipe_is_told_without_the_process_that_met_it() -> None:
    crash = find_crash_error("trainer", [AGENT_FAILED])
    assert crash is not None
    assert (str(crash), crash.code) == ("the agent failed", 70)
    crash = find_crash_error("trainer", [CRASHED])
    assert crash is not None
    assert str(crash).startswith("trainer of job trainer failed with exit code 139")


def test_time_limits_that_are_too_short_end_the_job() -> None:
    assert decide_restart([STOPPED], FailuresWithoutProgress(0, 2)) == "restart"
    assert decide_restart([STOPPED], FailuresWithoutProgress(0, 3)) == "fail"
    assert decide_restart([STOPPED, CRASHED], FailuresWithoutProgress(1, 3)) == "restart"
    assert decide_restart([DONE], FailuresWithoutProgress(0, 3)) == "done"


def test_starts_that_reach_the_time_limit_count_until_there_is_progress(tmp_path: Path) -> None:
    progress, late = tmp_path / "metrics.jsonl", TaskExit(STOPPED_EXIT_CODE, reason=LIMIT)

    def end(*outcomes: TaskExit, grows: bool = False) -> int:
        start = StartProgressTracker(JobPaths(tmp_path), str(progress))
        if grows:
            progress.write_text("a step\n")
        return start.update_failure_counts(outcomes).time_limit_stops

    assert [end(late), end(late, STOPPED), end(STOPPED), end(late)] == [1, 2, 2, 3]
    assert [end(late, grows=True), end(late)] == [1, 2]


def test_only_crashes_in_starts_without_progress_count(tmp_path: Path) -> None:
    progress = tmp_path / "metrics.jsonl"

    def end(*outcomes: TaskExit, file: str = str(progress), grows: bool = False) -> int:
        start = StartProgressTracker(JobPaths(tmp_path), file)
        if grows:
            progress.write_text("a step\n")
        return start.update_failure_counts(outcomes).failures

    assert [end(CRASHED), end(CRASHED, grows=True), end(CRASHED)] == [1, 0, 1]
    assert [end(STOPPED, DONE), end(BAD_NODE), end(CRASHED, file="")] == [1, 1, 2]


def test_other_tasks_find_the_first_ones_start_and_earlier_ones_are_over(tmp_path: Path) -> None:
    first = starts.claim_next_start(tmp_path / "starts", "7.0", "n01", "")
    assert not starts.is_superseded(tmp_path / "starts", first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(starts.await_start, tmp_path / "starts", "7.1", "n02", scaled(60.0))
        time.sleep(0.1)
        assert not waiting.done(), "an earlier start is not this one"
        taken = starts.claim_next_start(tmp_path / "starts", "7.1", "n01", "10.0.0.1:5")
        assert waiting.result(scaled(60.0)) == taken
    assert taken.number == 2
    superseded = [starts.is_superseded(tmp_path / "starts", start) for start in (first, taken)]
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


def test_end_and_last_save_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    starts.record_checkpoint_duration(30.0)  # the storage refuses, which the log says
