"""A job that asks for another start: held, refused, unheard; and which nodes it must not get."""

import errno
import os
import time
from pathlib import Path

import pytest

from areal_hpc.jobs import requeue
from areal_hpc.jobs.requeue import (
    RequeueResult,
    StartProgressTracker,
    build_exclude_list,
    release_jobs_held_while_idle,
    requeue_or_resubmit,
)
from areal_hpc.jobs.restart_policy import (
    FailuresWithoutProgress,
    RestartDecision,
    decide_restart,
)
from areal_hpc.rundir.jobs import (
    EXCLUDED_NODE_LIFETIME_S,
    STOPPED_EXIT_CODE,
    ExcludedNode,
    JobSpec,
    LaunchFile,
    SlurmLaunchInfo,
    TaskExit,
    add_excluded_node,
    list_jobs_that_gave_nodes_back,
    list_unexpired_excluded_nodes,
)
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from tests.support.deadlines import scaled
from tests.support.scripted_slurm import ScriptedSlurm
from tests.support.slurm_launch import build_slurm_launch_info

HOLD_UNHEARD = "requeuehold) echo PENDING > $STATE; echo Socket timed out >&2; exit 1"
HOLD_REFUSED = "requeuehold) echo Job is no longer pending >&2; exit 1"
DECISIONS: tuple[RestartDecision, ...] = ("restart", "hold_for_user", "hold")
RELEASE = "release) echo RUNNING > $STATE"
RELEASE_REFUSED = "release) echo Invalid job id specified >&2; exit 1"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("areal_hpc.jobs.requeue.RETRY_PAUSE_S", 0.0)
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.state = "RUNNING"
    return slurm


@pytest.fixture
def launch(paths: RunPaths) -> LaunchFile:
    files = paths.job("trainer")
    files.root.mkdir(parents=True)
    told = build_slurm_launch_info(paths, "trainer")
    job = JobSpec("trainer", "train", [])
    return LaunchFile(job, str(files.root), "", str(paths.events), {}, slurm=told)


def list_held(paths: RunPaths) -> list[str]:
    return [job.root.name for job in list_jobs_that_gave_nodes_back(paths.jobs_dir)]


def test_a_job_that_is_held_without_an_answer_is_released_nevertheless(
    slurm: ScriptedSlurm, launch: LaunchFile, paths: RunPaths
) -> None:
    slurm.answer_about_jobs(HOLD_UNHEARD, RELEASE)
    assert requeue_or_resubmit(launch, time.monotonic() + scaled(60.0), "hold") == "ended by Slurm"
    assert list_held(paths) == ["trainer"]
    assert release_jobs_held_while_idle(paths.jobs_dir) == ["trainer"]
    assert (slurm.state, list_held(paths)) == ("RUNNING", [])


def test_a_job_that_slurm_does_not_hold_is_on_no_list(
    slurm: ScriptedSlurm, launch: LaunchFile, paths: RunPaths
) -> None:
    slurm.answer_about_jobs(HOLD_REFUSED)
    slurm.answer("sbatch", "echo no room >&2; exit 1")
    told: list[str] = []
    give_up_at = time.monotonic() + scaled(60.0)
    assert requeue_or_resubmit(launch, give_up_at, "hold", told.append) == "not requeued"
    assert "no room" in told[0]
    assert list_held(paths) == []


def submit_again_instead(
    slurm: ScriptedSlurm, launch: LaunchFile, decision: RestartDecision
) -> RequeueResult:
    """End a job that may not be requeued; its script becomes job 9."""
    refused = "requeue*) echo Requested operation is presently disabled >&2; exit 1"
    slurm.answer_about_jobs(refused, "release) echo RUNNING > $STATE")
    slurm.answer("sbatch", "echo 9")
    slurm.answer("squeue", "true")
    return requeue_or_resubmit(launch, time.monotonic() + scaled(60.0), decision)


def test_a_job_that_may_not_be_requeued_is_submitted_again_held_where_it_is_to_be_held(
    slurm: ScriptedSlurm, launch: LaunchFile, paths: RunPaths
) -> None:
    found = {one: submit_again_instead(slurm, launch, one) for one in DECISIONS}
    assert found == {
        "restart": "resubmitted",
        "hold_for_user": "held for user",
        "hold": "held",
    }
    assert ["--hold" in call for call in slurm.list_calls("sbatch")] == [False, True, True]
    assert list_held(paths) == ["trainer"]
    slurm.state = "PENDING"
    assert release_jobs_held_while_idle(paths.jobs_dir) == ["trainer"]
    assert slurm.list_calls("scontrol release") == ["scontrol release 9"]


def test_a_job_that_slurm_ends_at_its_time_limit_before_it_is_asked_is_submitted_again(
    slurm: ScriptedSlurm, launch: LaunchFile
) -> None:
    over = "JobId=7 JobState=COMPLETING Reason=TimeLimit EndTime=Unknown ExcNodeList=(null)"
    # The first call is ended with the job's other processes.
    slurm.answer("scontrol", f"[ $(wc -l < $CALLS) -gt 1 ] || kill -TERM $$; echo {over!r}")
    slurm.answer("sbatch", "echo 9")
    slurm.answer("squeue", "true")
    assert requeue_or_resubmit(launch, time.monotonic() + scaled(60.0)) == "resubmitted"
    assert len(slurm.list_calls("sbatch")) == 1


def test_a_job_that_cannot_be_noted_as_held_is_not_left_held(
    slurm: ScriptedSlurm, launch: LaunchFile, paths: RunPaths
) -> None:
    paths.job("trainer").hold_note.mkdir(parents=True)  # a folder takes no file's place
    assert submit_again_instead(slurm, launch, "hold") == "resubmitted"
    assert slurm.list_calls("scontrol release") == ["scontrol release 9"]


def test_a_note_in_the_writing_and_one_that_goes_leave_the_other_held_jobs_their_release(
    slurm: ScriptedSlurm, paths: RunPaths
) -> None:
    slurm.state = "PENDING"
    slurm.answer_about_jobs(RELEASE)
    notes = paths.job("cell-0").hold_note.parent
    notes.mkdir(parents=True)
    (notes / "cell-0").touch()
    (notes / "cell-1").symlink_to(notes / "gone")
    (notes / "cell-2").write_text("7")
    assert release_jobs_held_while_idle(paths.jobs_dir) == ["cell-2"]
    assert slurm.list_calls("scontrol release") == ["scontrol release 7"]
    assert (notes / "cell-0").exists(), "its writer is about to ask Slurm"


def test_a_storage_without_an_answer_keeps_no_job_from_its_requeue(
    slurm: ScriptedSlurm, launch: LaunchFile, paths: RunPaths
) -> None:
    slurm.answer_about_jobs("requeue) echo PENDING > $STATE")
    paths.excluded_nodes.mkdir(parents=True)  # reading it is an error, as it is of a stale handle
    assert requeue_or_resubmit(launch, time.monotonic() + scaled(60.0)) == "requeued"
    assert slurm.list_calls("scontrol requeue") == ["scontrol requeue 7"]


def test_crashes_that_cannot_be_counted_wait_and_then_hold_the_job(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk a job would submit itself without an end."""
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

    assert count(crash, errno.ENOSPC) == "hold_for_user"
    assert waited_s == [60.0, 120.0, 240.0]
    assert count(crash, errno.ENOSPC, preempted=True) == "hold_for_user"
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
    path = tmp_path / "excluded_nodes.jsonl"
    slurm = SlurmLaunchInfo("", "", str(path), "trainer", "", "", excluded_by_recipe="n[01-02]")
    assert build_exclude_list(slurm, "n[01-02]") == "n[01-02]"
    long_ago = time.time() - EXCLUDED_NODE_LIFETIME_S - 1
    for node in ("n02", "n05"):
        append_line(path, ExcludedNode(node, "no GPU", long_ago))
    add_excluded_node(path, "n07", "no storage", "9")
    assert list_unexpired_excluded_nodes(path) == ["n07"]
    assert build_exclude_list(slurm, "n[01-02],n05,n09") == "n01,n02,n09,n07"
    add_excluded_node(path, "n05", "no GPU", "12")
    assert build_exclude_list(slurm, "n[01-02],n05") == "n[01-02],n05,n07", "it failed again"
