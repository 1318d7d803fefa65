"""What the end of a job's tasks means for the job."""

from pathlib import Path

import pytest

from areal_hpc.jobs.requeue import StartProgressTracker
from areal_hpc.jobs.restarts import TIME_LIMIT_REASON as LIMIT
from areal_hpc.jobs.restarts import (
    FailuresWithoutProgress,
    decide_restart,
    find_crash_error,
)
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE, TaskExit
from areal_hpc.rundir.paths import JobPaths

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
