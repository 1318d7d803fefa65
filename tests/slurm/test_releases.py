"""Preemption of a job on the newest Slurm unpacked here; `make nightly` runs all on each."""

from pathlib import Path

from slurm.devcluster.roots import list_unpacked_versions
from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.commands import areal_hpc
from tests.support.devclusters import devcluster
from tests.support.environments import CHECKOUT


def test_a_job_on_the_newest_slurm_is_preempted_and_goes_on(tmp_path: Path) -> None:
    newest = list_unpacked_versions(CHECKOUT)[-1]
    with devcluster(tmp_path / "state", "--nodes=2", release=newest) as cluster:
        assert f" {newest}." in cluster.slurm("squeue", "--version")
        assert f"Slurm      slurm-wlm {newest}." in cluster.done("status")
        job = SupervisedJob(cluster, tmp_path / "run", "trainer")
        job.submit("steady", "--partition=scavenger", "--requeue", "--nodelist=n01")
        job.awaits_told("began 1")
        cluster.submit("sleep 1", "--partition=priority", "--exclusive", "--nodelist=n01")
        job.awaits_told("began 1", "saved 0", "began 2")
        assert job.restarts() == 1
        output = areal_hpc("doctor", environ=cluster.environ).stdout
        assert f"{newest}: the tests run on it" in output
        cluster.cancel_all()
        assert "CANCELLED" in cluster.slurm("sacct", "-n", "-X", "-o", "State", "-j", job.job_id)
