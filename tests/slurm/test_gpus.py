"""GPUs that Slurm gives a job, made up, reach the processes of its tasks."""

from pathlib import Path

import pytest

from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.devclusters import Devcluster


@pytest.mark.parametrize(
    ("asked", "given"),
    [("--gres=gpu:3", "0,1,2"), ("--gpus-per-task=1", "0"), ("--mem=401", "None")],
)
def test_processes_see_the_gpus_of_their_task(
    cluster: Devcluster, tmp_path: Path, asked: str, given: str
) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "trainer")
    gpus = (asked,) if asked else ()
    job.submit("show_gpus", "--partition=priority", "--nodes=2", *gpus, tasks=2)
    job.awaits_state("COMPLETED")
    assert sorted(job.words) == [f"task {rank} has GPUs {given}" for rank in range(2)]
