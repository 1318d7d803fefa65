"""Jobs laid at submission for sites where jobs may not submit jobs: each takes the place of one."""

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_hpc.rundir.jobs import (
    Submission,
    list_waiting_successors,
    read_submissions,
    record_submission,
)
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT
from areal_hpc.slurm.batch_script.successors import build_options_to_start_after_failure
from areal_hpc.slurm.submit_exactly_once import JobIdentity, submit_script
from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.commands import said_by
from tests.support.devclusters import SLURM_POLL_S, Devcluster, Submitting, light_overrides
from tests.support.submissions import JOBS, numbers, queued, recorded
from tests.support.waiting import wait_for

pytestmark = pytest.mark.thorough  # successors are an option of few sites

CELLS = ("cell-0",)
PARTITION = "--partition=priority"
TWO = "cluster.slurm.successors=1"
TIGHT = "cluster.slurm.mem=100M"
LOOKS_S = 7.0
"""Three looks of a caretaker of a test's job: what is missing at two it submits."""
LATER = "cluster.slurm.sbatch.begin=now+1hour"
"""A job that ran might end by itself."""


@contextmanager
def forbidden_submissions(cluster: Devcluster) -> Iterator[None]:
    """No node of the cluster may submit jobs. Nor does Slurm start any that were, meanwhile.

    It takes this machine and the nodes for the same host: where only the nodes are forbidden,
    what this machine submitted would start.
    """
    update = ("scontrol", "update", "PartitionName=priority")
    cluster.slurm(*update, "AllocNodes=login")
    try:
        submit = f"sbatch {PARTITION} --wrap=true 2>&1 || :"
        refused = cluster.slurm("srun", "--partition=scavenger", "sh", "-c", submit)
        assert "Access/permission denied" in refused
        yield
    finally:
        cluster.slurm(*update, "AllocNodes=ALL")


def submit_with_successors(
    job: SupervisedJob,
    does: str,
    successors: int,
    setup: tuple[str, ...] = (),
    tasks: int = 1,
) -> list[str]:
    """Submit a job with successors; all numbers."""
    job.submit(does, PARTITION, "--no-requeue", only_now=("--hold",), setup=setup, tasks=tasks)
    chain = [job.job_id]
    for place in range(1, successors + 1):
        identity = JobIdentity.create(job.name, str(job.run.root), place)
        told = ["--hold", *build_options_to_start_after_failure(chain)]
        job_id = submit_script(job.files.script, identity, told, environ=job.cluster.environ)
        record_submission(
            job.run.submissions,
            Submission(job.name, job_id, 1, 0.0, str(job.files.script), identity.token, place),
        )
        chain.append(job_id)
    job.cluster.slurm("scontrol", "release", ",".join(chain))
    return chain


def waiting(job: SupervisedJob) -> list[str]:
    return [
        one.job_id
        for one in list_waiting_successors(read_submissions(job.run.submissions), job.name)
    ]


@pytest.mark.timeout(240)
def test_a_successor_takes_the_place_where_jobs_may_not_submit(
    cluster: Devcluster, tmp_path: Path
) -> None:
    trainer, cell = (
        SupervisedJob(cluster, tmp_path / "run", name, others=CELLS) for name in ("trainer", *CELLS)
    )
    chain = submit_with_successors(trainer, "steady", 2)
    without_commands = f"export PATH={_make_path_without_slurm(tmp_path)}"
    cells = submit_with_successors(cell, "steady", 1, (_call_srun_by_path(), without_commands))
    trainer.awaits_words(1)
    cell.awaits_words(1)
    for job in (cell, trainer):  # the caretaker of the other one looks on
        with forbidden_submissions(cluster):
            cluster.slurm("scancel", "--signal=TERM", job.job_id)
            job.awaits_state("FAILED")
            time.sleep(LOOKS_S)
        job.awaits_told("began 1", "saved 0", "began 2")
    assert (trainer.newest_id(), waiting(trainer)) == (chain[1], chain[2:])
    assert (cell.newest_id(), waiting(cell)) == (cells[1], [])
    left = [row for row in trainer.events() if row["event"] == "job_left_to_successor"]
    assert sorted(str(row["role"]) for row in left) == ["cell-0", "trainer"]
    told = {row["event"] for row in trainer.events()}
    assert told.isdisjoint({"job_submitted_again", SUBMISSION_REFUSED_EVENT})
    for job in (trainer, cell):
        job.let_go()
    trainer.awaits(lambda: numbers(cluster) == [])
    assert [cluster.job_state(one) for one in chain] == ["FAILED", "COMPLETED", "CANCELLED"]
    assert trainer.told == ["began 1", "saved 0", "began 2", "done"]


def _make_path_without_slurm(folder: Path) -> Path:
    """A folder for PATH that lacks Slurm's commands, as an image may."""
    place = folder / "bin"
    place.mkdir()
    for name in ("sh", "bash", "env", "nvidia-smi"):
        if found := shutil.which(name):
            (place / name).symlink_to(found)
    return place


def _call_srun_by_path() -> str:
    """A line of a script: srun is found though PATH does not lead to it."""
    return f'srun() {{ {shutil.which("srun")} "$@"; }}'


def test_a_successor_leaves_where_nobody_is_to_bring_the_job_back(
    cluster: Devcluster, tmp_path: Path
) -> None:
    refusing, unwanted = (
        SupervisedJob(cluster, tmp_path / name, name) for name in ("refusing", "unwanted")
    )
    refused = submit_with_successors(refusing, "refuse", 2)
    cancelled = submit_with_successors(unwanted, "steady", 2, tasks=2)
    unwanted.awaits_words(2)
    cluster.slurm("scancel", unwanted.job_id)
    _assert_left(refusing, refused, "refusing gave up: ")
    _assert_left(unwanted, cancelled, f"a person cancelled unwanted (job {cancelled[0]})")
    assert refusing.outcome().gave_up


def _assert_left(job: SupervisedJob, chain: list[str], reason: str) -> None:
    """The first successor ended well without a start of the job, the second was removed."""
    job.awaits(lambda: set(chain).isdisjoint(numbers(job.cluster)))
    assert [job.cluster.job_state(one) for one in chain[1:]] == ["COMPLETED", "CANCELLED"]
    (event,) = [row for row in job.events() if row["event"] == "successor_left"]
    assert str(event["reason"]).startswith(reason)
    assert (job.newest_id(), job.starts()) == (chain[0], 1)


@pytest.fixture
def run(cluster: Devcluster, tmp_path: Path) -> Submitting:
    return Submitting(cluster, tmp_path / "runs")


def test_successors_are_submitted_named_completed_and_cancelled(
    cluster: Devcluster, run: Submitting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, light = str(run.paths.root), (TWO, TIGHT, LATER, *light_overrides(tmp_path))
    monkeypatch.setenv("AREAL_HPC_FAULTS", "submit.before_record@4=kill")
    assert run.submit(*light).returncode == -signal.SIGKILL
    monkeypatch.delenv("AREAL_HPC_FAULTS")
    (unknown,) = set(numbers(cluster)) - {one.job_id for one in run.submissions}
    status = run.call("status", root).stdout
    assert f"job {unknown} (successor 1 of trainer) is not on record" in status
    said_by(run.call("resume", root))
    assert queued(cluster) == sorted([*JOBS, *JOBS])
    assert sorted({one.job_id for one in run.submissions}) == numbers(cluster)
    assert "JobHeldUser" not in cluster.slurm("squeue", "-h", "-o", "%r")
    before = recorded(run)
    successor = {one.job: one.job_id for one in run.submissions if one.successor}
    assert successor["trainer"] == unknown
    sft = f"afterok:{before['sft']}(unfulfilled)?afterok:{successor['sft']}(unfulfilled)"
    assert cluster.slurm("squeue", "-h", "-j", before["cell-1"], "-o", "%E") == sft
    assert f"fail: {unknown}" in run.call("status", root).stdout
    cluster.slurm("scancel", before["cell-0"], successor["cell-1"])
    gone = {before["cell-0"], successor["cell-1"]}
    wait_for(lambda: gone.isdisjoint(numbers(cluster)), every_s=SLURM_POLL_S)
    said_by(run.call("resume", root))
    assert queued(cluster) == sorted([*JOBS, *JOBS])
    assert recorded(run) == {**before, "cell-0": successor["cell-0"]}
    assert "cancelled 8 jobs; none are left" in said_by(run.call("cancel", root))
    assert numbers(cluster) == []
