"""What the end of a job's tasks means for the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.cluster.requeue import Usefulness, count_fruitless, judge
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE, TaskExit
from areal_hpc.rundir.paths import JobPaths

DONE, STOPPED, CRASHED = TaskExit(0), TaskExit(STOPPED_EXIT_CODE), TaskExit(139, "trainer")
LET_DOWN, MISTAKEN = TaskExit(75, "ledger"), TaskExit(78, "trainer")
IDLE = TaskExit(79, "driver")
BAD_NODE = TaskExit(75, "probe", faulty_node="n07")


@pytest.mark.parametrize(
    ("outcomes", "fruitless", "verdict"),
    [
        ([DONE, DONE], 0, "done"),
        ([STOPPED, DONE], 0, "again"),
        ([STOPPED], 9, "again"),
        ([CRASHED, STOPPED], 1, "again"),
        ([CRASHED, STOPPED], 2, "fail"),
        ([LET_DOWN], 2, "again"),
        ([LET_DOWN], 3, "fail"),
        ([LET_DOWN, CRASHED], 2, "fail"),
        ([MISTAKEN, STOPPED], 0, "fail"),
        ([BAD_NODE, STOPPED], 9, "again"),
        ([IDLE, STOPPED], 0, "hold"),
        ([IDLE, CRASHED], 1, "again"),
    ],
)
def test_a_job_is_started_again_while_that_helps(
    outcomes: list[TaskExit], fruitless: int, verdict: str
) -> None:
    assert judge(outcomes, fruitless) == verdict


def test_only_crashes_without_progress_count() -> None:
    assert count_fruitless(1, [CRASHED], was_of_use=False) == 2
    assert count_fruitless(1, [CRASHED], was_of_use=True) == 0
    assert count_fruitless(1, [STOPPED, DONE], was_of_use=False) == 1
    assert count_fruitless(1, [BAD_NODE], was_of_use=False) == 1


def test_a_start_in_which_the_progress_grew_was_of_use(tmp_path: Path) -> None:
    progress = tmp_path / "metrics.jsonl"
    assert Usefulness(JobPaths(tmp_path), str(progress)).close([CRASHED]) == 1
    start = Usefulness(JobPaths(tmp_path), str(progress))
    progress.write_text("a step\n")
    assert start.close([CRASHED]) == 0
    assert Usefulness(JobPaths(tmp_path), str(progress)).close([CRASHED]) == 1
    assert Usefulness(JobPaths(tmp_path), "").close([CRASHED]) == 2
