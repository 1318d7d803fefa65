"""A job that asks for another start: refused, unheard; and which nodes it must not get."""

import errno
import os
import time
from functools import partial
from pathlib import Path

import pytest

from areal_hpc.jobs import requeue
from areal_hpc.jobs.requeue import StartProgressTracker, build_exclude_list, requeue_own_job
from areal_hpc.jobs.restarts import FailuresWithoutProgress, decide_restart
from areal_hpc.rundir.jobs import (
    EXCLUDED_NODE_LIFETIME_S,
    STOPPED_EXIT_CODE,
    ExcludedNode,
    TaskExit,
    add_excluded_node,
    list_unexpired_excluded_nodes,
)
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
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
    told: list[str] = []
    give_up_at = time.monotonic() + scaled(60.0)
    assert requeue_own_job(paths, "", give_up_at, told.append) == result
    assert (len(told), slurm.list_calls("scontrol requeue")) == (refusals, ["scontrol requeue 7"])


def test_crashes_that_cannot_be_counted_wait_and_then_end_the_job(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk nothing would bound the starts of a job."""
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
