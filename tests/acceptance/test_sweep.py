"""Three learning rates as one array, each a run of its own with the real trainer and SGLang."""

from pathlib import Path

import pytest

from areal_hpc.rundir.jobs import read_submissions
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, audit_of, said_by
from tests.support.devclusters import Devcluster, devcluster
from tests.support.small_run import SIZES
from tests.support.waiting import wait_for

RATES = ("1e-4", "4e-4", "1.6e-3")
STEPS = 3
CUT_DOWN = (
    *SIZES,
    "sft.total_steps=20",
    "evaluation.every_steps=0",
    "inference.cells=1",
    f"trainer.total_steps={STEPS}",
    "trainer.parallel.dp=1",
)
ONE_AFTER_ANOTHER = (
    "cluster.slurm.exclusive=true",
    "cluster.slurm.jobs.cell.sbatch={nodelist: n01}",
    "cluster.slurm.jobs.trainer.sbatch={nodelist: n02}",
)
"""This machine has room for one SGLang: members wait for their nodes."""


def call(cluster: Devcluster, *arguments: str) -> str:
    return said_by(areal_hpc(*arguments, environ=cluster.environ, timeout_s=300))


@pytest.mark.timeout(2400)
def test_three_learning_rates_run_as_one_array_and_are_listed_side_by_side(tmp_path: Path) -> None:
    fileroot = tmp_path / "runs"
    runs = [RunPaths(fileroot / "quickstart" / f"slurm-lr-{rate}") for rate in RATES]
    with devcluster(tmp_path / "cluster", "--nodes=2", "--timeout-s=100") as cluster:
        call(
            cluster,
            *("submit", "recipes/quickstart_slurm.yaml", f"cluster.fileroot={fileroot}"),
            *(*CUT_DOWN, *ONE_AFTER_ANOTHER),
            *("--sweep", f"trainer.optimizer.lr={','.join(RATES)}"),
        )
        numbers = [[one.job_id for one in read_submissions(run.submissions)] for run in runs]
        arrays = {tuple(number.split("_")[-2] for number in ids) for ids in numbers}
        assert len(arrays) == 1, "one array for each job"
        wait_for(lambda: all(run.finished_marker.exists() for run in runs), 2000)
        wait_for(lambda: cluster.slurm("squeue", "-h") == "", 120)
        table = [line.split() for line in call(cluster, "list", str(fileroot)).splitlines()]
        for run in runs:
            audit = audit_of(run.root, cluster.environ)
            assert audit == f"trained_once={4 * STEPS} duplicates=0 lost=0 open=0"
    last = {run.root.name: read_readable_records(run.metrics)[-1] for run in runs}
    assert table[0] == ["run", "state", "step", "reward", "held-out", "lr"]
    assert sorted(table[1:]) == sorted(
        [
            *(f"quickstart/{name}", "finished", f"{STEPS}/{STEPS}"),
            *(f"{row['reward/mean']:.3f}", f"{row['eval/reward']:.3f}"),
            str(float(name.removeprefix("slurm-lr-"))),
        ]
        for name, row in last.items()
    )
