"""A run as Slurm jobs: submitted at once from outside, spread over nodes, ended by itself."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.cluster.submissions import Submission, read_submissions
from areal_hpc.layout import RunLayout
from areal_hpc.telemetry import read_json_lines
from tests.slurm.devclusters import CHECKOUT, Devcluster, devcluster, wait_for

CUT_DOWN = (
    "train_dataset.kwargs.size=64",
    "valid_dataset.kwargs.size=8",
    "warmup.dataset.kwargs.size=640",
    "warmup.total_steps=20",
    "warmup.batch_size=16",
    "warmup.commit_every_steps=20",
    "evaluation.every_steps=0",
    "evaluation.tasks=8",
    "rollout.n_samples=4",
    "rollout.max_concurrent_rollouts=16",
    "trainer.total_steps=5",
    "trainer.batch_size=4",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with devcluster(tmp_path_factory.mktemp("cluster") / "state", "--nodes=4") as found:
        yield found


class Submitting:
    """`areal-hpc` in the environment of a cluster, for one run directory."""

    def __init__(self, cluster: Devcluster, fileroot: Path) -> None:
        self._cluster = cluster
        self._fileroot = fileroot
        self.layout = RunLayout(fileroot / "quickstart" / "slurm")

    def call(self, *arguments: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, "-m", "areal_hpc", *arguments),
            cwd=CHECKOUT,
            env=self._cluster.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def submit(self, *options: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
        recipe = ("recipes/quickstart_slurm.yaml", f"cluster.fileroot={self._fileroot}", *CUT_DOWN)
        return self.call("submit", *recipe, *options, timeout_s=timeout_s)

    @property
    def submissions(self) -> list[Submission]:
        return read_submissions(self.layout.submissions)


@pytest.fixture
def run(cluster: Devcluster, tmp_path: Path) -> Iterator[Submitting]:
    yield Submitting(cluster, tmp_path / "runs")
    cluster.cancel_all()


@pytest.mark.timeout(400)
def test_a_submitted_run_trains_over_four_nodes_and_ends_by_itself(
    cluster: Devcluster, run: Submitting
) -> None:
    ended = run.submit("--wait", timeout_s=380)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step      5/5" in ended.stdout
    assert [row["step"] for row in read_json_lines(run.layout.metrics)][-1] == 5
    assert [one.job for one in run.submissions] == ["warmup", "trainer", "cell-0", "cell-1"]
    states = {one.job: cluster.job_state(one.job_id) for one in run.submissions}
    assert set(states.values()) == {"COMPLETED"}, states
    nodes = {
        one.job: cluster.slurm("sacct", "-X", "-n", "-P", "-j", one.job_id, "-o", "NodeList")
        for one in run.submissions
    }
    assert len({nodes["cell-0"], nodes["cell-1"]}) == 2
    assert len(nodes["trainer"].split(",")) == 2 or "-" in nodes["trainer"]
    audit = run.call("audit", str(run.layout.root))
    assert "trained_once=20 duplicates=0 lost=0" in audit.stdout, audit.stdout + audit.stderr


def test_a_dry_run_touches_nothing(run: Submitting) -> None:
    shown = run.submit("--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("#!/bin/bash") == 4
    assert not run.layout.root.exists()


def test_a_run_with_jobs_in_the_queue_is_not_submitted_twice(
    cluster: Devcluster, run: Submitting
) -> None:
    held = ("cluster.slurm.sbatch_flags=[--hold]",)
    first = run.submit(*held)
    assert first.returncode == 0, first.stdout + first.stderr
    script = (run.layout.jobs_dir / "cell-1" / "job.sbatch").read_text()
    assert "--dependency=afterok:" + run.submissions[0].job_id in script
    for again in (run.submit(*held), run.call("run", str(run.layout.recipe))):
        assert again.returncode == 75
        assert all(one.job_id in again.stderr for one in run.submissions)
    assert cluster.slurm("squeue", "-h", "-o", "%k").splitlines() == [str(run.layout.root)] * 4
    cluster.cancel_all()
    again = run.submit(*held)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [one.attempt for one in run.submissions] == [1] * 4 + [2] * 4


def test_a_refused_job_takes_the_others_back(cluster: Devcluster, run: Submitting) -> None:
    refused = run.submit("cluster.slurm.jobs.cell.constraint=unheard_of")
    assert refused.returncode == 78
    assert "Slurm refused the job cell-0" in refused.stderr
    wait_for(lambda: cluster.slurm("squeue", "-h") == "", 20)
