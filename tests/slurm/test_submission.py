"""Submissions that slurmctld answers late or that are killed: each job is submitted once."""

import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from areal_hpc.rundir.jobs import get_latest_submissions, read_submissions
from areal_hpc.rundir.paths import RunPaths
from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.commands import said_by
from tests.support.deadlines import scaled
from tests.support.devclusters import (
    HELD,
    JOBS,
    SLURM_POLL_S,
    Devcluster,
    Submitting,
    light_overrides,
    numbers,
    queued,
    recorded,
    stopped_slurmctld,
)
from tests.support.thoroughness import choose
from tests.support.waiting import wait_for

TIGHT = "cluster.slurm.sbatch.mem=100M"
LATE_S = 13.0
"""Delay above sbatch's wait for an answer (MessageTimeout, 10 s)."""


@pytest.fixture
def run(cluster: Devcluster, tmp_path: Path) -> Submitting:
    return Submitting(cluster, tmp_path / "runs")


def ended(submitting: subprocess.Popen[str]) -> str:
    shown, _ = submitting.communicate(timeout=scaled(100))
    assert submitting.returncode == 0, shown
    return shown


def test_a_job_that_sbatch_is_told_of_too_late_is_adopted(
    cluster: Devcluster, run: Submitting, tmp_path: Path
) -> None:
    submitting = run.start(*HELD, *light_overrides(tmp_path))
    wait_for(lambda: run.submissions or submitting.poll() is not None)
    with stopped_slurmctld(cluster):
        time.sleep(LATE_S)
    shown = ended(submitting)
    assert "looking for the job before another try" in shown
    assert "was accepted nevertheless" in shown
    assert queued(cluster) == JOBS
    assert sorted(recorded(run).values()) == numbers(cluster)


@pytest.mark.parametrize("command", choose(["cancel", "resume"], "resume"))
def test_what_a_killed_submission_left_is_named_and_dealt_with(
    cluster: Devcluster,
    run: Submitting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    root, light = str(run.paths.root), (TIGHT, *light_overrides(tmp_path))
    monkeypatch.setenv("AREAL_HPC_FAULTS", "submit.before_record@2=kill")
    assert run.submit(*light).returncode == -signal.SIGKILL
    monkeypatch.delenv("AREAL_HPC_FAULTS")
    assert list(recorded(run)) == ["sft"]
    (unknown,) = set(numbers(cluster)) - set(recorded(run).values())
    status = run.call("status", root).stdout
    assert f"job {unknown} (trainer) is not on record" in status
    again = run.submit(*light)
    assert again.returncode == 75
    assert unknown in again.stderr
    assert "areal-hpc resume" in again.stderr
    output = said_by(run.call(command, root))
    if command == "cancel":
        assert "cancelled 2 jobs; none are left" in output
        assert numbers(cluster) == []
    else:
        assert recorded(run)["trainer"] == unknown
        assert queued(cluster) == JOBS
        assert sorted(recorded(run).values()) == numbers(cluster)
        assert "JobHeldUser" not in cluster.slurm("squeue", "-h", "-o", "%r")


@pytest.mark.parametrize("hosts", choose([1, 2], 2))
def test_of_two_submissions_at_the_same_time_one_is_refused(
    cluster: Devcluster, run: Submitting, tmp_path: Path, hosts: int
) -> None:
    """Submissions of two hosts have locks of their own, as on NFS with local locks."""
    light = (*HELD, *light_overrides(tmp_path))
    run.paths.root.mkdir(parents=True)
    run.paths.lock.touch()
    lock_here = tmp_path / "lock"
    lock_here.touch()
    on_another_host = (
        *("unshare", "--mount", "--uts", "sh", "-c"),
        f'hostname elsewhere && mount --bind {lock_here} {run.paths.lock} && exec "$@"',
        "sh",
    )
    both = [run.start(*light), run.start(*light, before=on_another_host if hosts == 2 else ())]
    shown = [process.communicate(timeout=scaled(100))[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 75], shown
    assert queued(cluster) == JOBS
    assert sorted(recorded(run).values()) == numbers(cluster)


def test_held_jobs_are_released_by_resume(
    cluster: Devcluster, run: Submitting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_HPC_FAULTS", "submit.before_release=kill")
    assert run.submit(TIGHT, *light_overrides(tmp_path)).returncode == -signal.SIGKILL
    monkeypatch.delenv("AREAL_HPC_FAULTS")
    reasons = cluster.slurm("squeue", "-h", "-o", "%r").splitlines()
    assert reasons == ["JobHeldUser"] * len(JOBS)
    assert "its user holds it" in run.call("status", str(run.paths.root)).stdout
    assert said_by(run.call("resume", str(run.paths.root))).count("will be released") == len(JOBS)
    assert "JobHeldUser" not in cluster.slurm("squeue", "-h", "-o", "%r")
    assert len(run.submissions) == len(JOBS)


def test_a_run_that_was_moved_is_resumed_at_its_new_place(
    cluster: Devcluster, run: Submitting, tmp_path: Path
) -> None:
    said_by(run.submit(*HELD, *light_overrides(tmp_path)))
    before = recorded(run)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    paths = RunPaths(tmp_path / "elsewhere" / "quickstart" / "slurm")
    assert "moved    from" in said_by(run.call("resume", str(paths.root)))
    newest = get_latest_submissions(read_submissions(paths.submissions))
    now = {job: submission.job_id for job, submission in newest.items()}
    assert set(now) == set(before)
    assert set(now.values()).isdisjoint(before.values())
    assert sorted(now.values()) == numbers(cluster)
    comments = cluster.slurm("squeue", "-h", "-o", "%k").splitlines()
    assert all(comment.startswith(f"{paths.root} ") for comment in comments), comments
    assert not (tmp_path / "runs").exists()


def test_resume_submits_only_what_is_missing(
    cluster: Devcluster, run: Submitting, tmp_path: Path
) -> None:
    waits = "cluster.slurm.sbatch.begin=now+1hour"  # a job that ran might end by itself
    said_by(run.submit(TIGHT, waits, *light_overrides(tmp_path)))
    before = recorded(run)
    cluster.slurm("scancel", before["cell-1"])
    wait_for(lambda: before["cell-1"] not in numbers(cluster), every_s=SLURM_POLL_S)
    said_by(run.call("resume", str(run.paths.root)))
    now = recorded(run)
    assert {job for job in JOBS if now[job] != before[job]} == {"cell-1"}
    assert sorted(now.values()) == numbers(cluster)


def test_jobs_that_end_while_slurmctld_is_away_start_again_and_once(
    cluster: Devcluster, tmp_path: Path
) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "lonely")
    job.submit("steady", "--partition=priority", "--no-requeue")
    caretaker = job.lay_caretaker("--partition=priority")
    crashing = SupervisedJob(cluster, tmp_path / "run", "crashing")
    crashing.submit("steady", "--partition=priority", "--requeue")
    job.awaits_words(1)
    crashing.awaits_words(1)
    with stopped_slurmctld(cluster):
        job.stop_first_task()  # not by scancel: a controller that stands still sends no signal
        crashing.kill_process()
        time.sleep(scaled(LATE_S))  # longer than a job has to stop
    wait_for(lambda: job.newest_id() != job.job_id, 60, every_s=SLURM_POLL_S)
    job.awaits_words(3)
    crashing.awaits_told("began 1", "began 2")
    assert crashing.restarts() == 1
    names = Counter(cluster.slurm("squeue", "-h", "-t", "R,PD", "-o", "%i").split())
    assert names == Counter([job.newest_id(), crashing.job_id, caretaker.newest_id()])


def test_a_refused_submission_is_remembered_and_told(
    cluster: Devcluster, run: Submitting, tmp_path: Path
) -> None:
    root, light = str(run.paths.root), (TIGHT, *light_overrides(tmp_path))
    refused = run.submit(*light, "cluster.slurm.jobs.cell.partition=nowhere")
    assert refused.returncode == 78
    assert "sbatch rejected job cell-0" in refused.stderr
    assert "areal-hpc doctor" in refused.stderr
    assert numbers(cluster) == []
    why = run.call("why", root)
    assert why.returncode == 1
    headline = why.stdout.splitlines()[0]
    assert "sbatch rejected job cell-0: " in headline
    assert "invalid partition" in headline.lower()
    assert f"areal-hpc resume {root}" in why.stdout
    said_by(run.call("resume", root, "cluster.slurm.jobs.cell.partition=scavenger"))
    assert queued(cluster) == JOBS


def test_a_copy_of_a_run_leaves_its_jobs_alone_and_becomes_a_run_of_its_own(
    cluster: Devcluster, run: Submitting, tmp_path: Path
) -> None:
    said_by(run.submit(*HELD, *light_overrides(tmp_path)))
    original, copy = run.paths.root, tmp_path / "copies" / "copy"
    shutil.copytree(original, copy, symlinks=True)
    before = numbers(cluster)
    assert f"a copy of {original}" in run.call("status", str(copy)).stdout
    for command in ("cancel", "resume"):
        refused = run.call(command, str(copy))
        assert refused.returncode != 0
        assert f"areal-hpc resume {copy} --as NAME" in refused.stderr
    assert numbers(cluster) == before
    refused = run.call("resume", str(original), "--as", "second")
    assert "this is the run itself" in refused.stderr
    said_by(run.call("resume", str(copy), "--as", "second"))
    second = RunPaths(copy.with_name("second"))
    assert not copy.exists()
    assert len(numbers(cluster)) == 2 * len(before)
    assert "cancelled" in said_by(run.call("cancel", str(second.root)))
    assert numbers(cluster) == before
    assert f"a copy of {original}" not in run.call("status", str(second.root)).stdout
