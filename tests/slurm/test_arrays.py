"""Members of job arrays that must submit themselves again, and those that wait for them."""

import sys
from pathlib import Path

import pytest

from areal_hpc.jobs.supervisor import run_task
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.slurm.batch_script.script import JobRequest, RunContext, build_job_requests
from areal_hpc.slurm.submit import submit_held_array, write_member_payload
from areal_hpc.slurm.submit_exactly_once import release_jobs
from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.devclusters import Devcluster
from tests.support.environments import CHECKOUT

SITE = SlurmConfig(
    partition="priority",
    mem="400M",
    cpus_per_task=1,
    time_limit_minutes=30,
    requeue=False,
    setup=(f"export OMP_NUM_THREADS=1 PYTHONPATH={CHECKOUT}",),
)
"""Of a cluster that starts no job again under its number."""


def request(job: SupervisedJob, root: Path, site: SlurmConfig, *, is_array: bool) -> JobRequest:
    place = RunContext(
        name=root.name,
        run_dir=root,
        jobs_dir=root / "jobs",
        pythons={"agents": sys.executable},
        working_folder=CHECKOUT,
        is_array=is_array,
    )
    return build_job_requests([job.launch("steady").job], site, place)[0]


def submit_together(
    jobs: list[SupervisedJob], place: Path, after: str = "", site: SlurmConfig = SITE
) -> str:
    """Submit the same job of several runs as one array; its number."""
    array = request(jobs[0], place, site, is_array=True)
    alone = [request(job, job.root, site, is_array=False) for job in jobs]
    launches = [job.launch("steady") for job in jobs]
    asked = array.with_dependency(after) if after else array
    submitted = submit_held_array(asked, alone, launches, run_task, print)
    for job, one in zip(jobs, submitted, strict=True):
        write_member_payload(array.submitit_dir, one.job_id, job.files, run_task)
        job.is_submitted(one.job_id)
    array_id = submitted[0].job_id.partition("_")[0]
    release_jobs([array_id])
    return array_id


def dependency(job: SupervisedJob) -> str:
    """What it waits for, without how far that is."""
    listed = job.cluster.slurm("squeue", "-h", "--array", "-j", job.newest_id(), "-o", "%E")
    return listed.replace("(unfulfilled)", "")


def test_a_member_submits_its_own_index_again_as_often_as_need_be_and_all_who_wait_are_told(
    cluster: Devcluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    first = [SupervisedJob(cluster, tmp_path / name, "sft") for name in "abc"]
    second = [SupervisedJob(cluster, tmp_path / name, "trainer") for name in "abc"]
    array = submit_together(first, tmp_path / "sweep")
    submit_together(second, tmp_path / "sweep", f"aftercorr:{array}")
    last = cluster.submit("true", f"--dependency=afterok:{array}", "-p", "priority")
    # The last one: Slurm gives it the array's own number.
    member, numbers, words = first[2], [f"{array}_2"], ["began 1"]
    for job in first:
        job.awaits_told("began 1")
    for start in (2, 3):
        cluster.slurm("scancel", "--signal=TERM", member.newest_id())
        words += ["saved 0", f"began {start}"]
        member.awaits_told(*words)
        numbers.append(member.newest_id())
        alone, _, index = numbers[-1].partition("_")
        assert index == "2"
        assert (
            cluster.slurm("squeue", "-h", "--array", "-t", "all", "-j", alone, "-o", "%i")
            == (numbers[-1])
        )
        assert dependency(second[2]) == f"afterok:{numbers[-1]}"
    assert len(set(numbers)) == 3
    assert [first[0].told, first[1].told] == [["began 1"], ["began 1"]], "they were left alone"
    assert dependency(second[0]).startswith(f"aftercorr:{array}_*")
    awaited_by_last = cluster.slurm("squeue", "-h", "-j", last, "-o", "%E")
    assert all(f"afterok:{one}" in awaited_by_last for one in (f"{array}_0", numbers[-1]))
    for job in (*first, *second):
        job.let_go()
    for job in second:
        job.awaits_told("began 1", "done")
    cluster.await_state(last, "COMPLETED")
    assert member.told == [*words, "done"]


def test_a_member_that_slurm_requeues_leaves_those_that_are_done_alone(
    cluster: Devcluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    done, last = (SupervisedJob(cluster, tmp_path / name, "trainer") for name in "ab")
    array = submit_together(
        [done, last], tmp_path / "sweep", site=SITE.model_copy(update={"requeue": True})
    )
    done.let_go()
    cluster.await_state(f"{array}_0", "COMPLETED")
    last.awaits_told("began 1")
    cluster.slurm("scancel", "--signal=TERM", f"{array}_1")
    last.awaits_told("began 1", "saved 0", "began 2")
    assert last.newest_id() == f"{array}_1", "under its number"
    last.let_go()
    cluster.await_state(f"{array}_1", "COMPLETED")
    assert done.told == ["began 1", "done"]
