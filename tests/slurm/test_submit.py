"""A run as Slurm jobs: submitted at once from outside, spread over nodes, ended by itself."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.rundir.jobs import read_submissions
from areal_hpc.rundir.jsonl import read_lines
from areal_hpc.rundir.paths import RunPaths
from tests.support.devclusters import Devcluster, Submitting, devcluster
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with devcluster(tmp_path_factory.mktemp("cluster") / "state", "--nodes=4") as found:
        yield found


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
    assert [row["step"] for row in read_lines(run.paths.metrics)][-1] == 5
    assert [one.job for one in run.submissions] == ["sft", "trainer", "cell-0", "cell-1"]
    states = {one.job: cluster.job_state(one.job_id) for one in run.submissions}
    assert set(states.values()) == {"COMPLETED"}, states
    nodes = {
        one.job: cluster.slurm("sacct", "-X", "-n", "-P", "-j", one.job_id, "-o", "NodeList")
        for one in run.submissions
    }
    assert len({nodes["cell-0"], nodes["cell-1"]}) == 2
    assert len(nodes["trainer"].split(",")) == 2 or "-" in nodes["trainer"]
    audit = run.call("audit", str(run.paths.root))
    assert "trained_once=20 duplicates=0 lost=0" in audit.stdout, audit.stdout + audit.stderr


def test_a_dry_run_touches_nothing(run: Submitting) -> None:
    shown = run.submit("--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("#!/bin/bash") == 4
    assert not run.paths.root.exists()


def test_who_waits_can_leave_and_nobody_submits_what_is_queued(
    cluster: Devcluster, run: Submitting
) -> None:
    held = ("cluster.slurm.sbatch_flags=[--hold]",)
    waiting = run.start("--wait", *held)
    wait_for(lambda: len(run.submissions) == 4, 60)
    time.sleep(1)  # it watches now
    waiting.send_signal(signal.SIGINT)
    shown, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 130, shown
    assert "detached; jobs keep running" in shown
    script = (run.paths.jobs_dir / "cell-1" / "job.sbatch").read_text()
    assert "--dependency=afterok:" + run.submissions[0].job_id in script
    for again in (run.submit(*held), run.call("run", str(run.paths.recipe))):
        assert again.returncode == 75
        assert all(one.job_id in again.stderr for one in run.submissions)
    assert cluster.slurm("squeue", "-h", "-o", "%k").splitlines() == [str(run.paths.root)] * 4


def test_a_refused_job_takes_the_others_back(cluster: Devcluster, run: Submitting) -> None:
    refused = run.submit("cluster.slurm.jobs.cell.constraint=unheard_of")
    assert refused.returncode == 78
    assert "sbatch rejected job cell-0" in refused.stderr
    wait_for(lambda: cluster.slurm("squeue", "-h") == "", 60)


SWEEP = ("--sweep", "sft.optimizer.lr=1e-3,3e-3")
HELD = (
    "cluster.slurm.jobs.trainer.sbatch_flags=[--hold]",
    "cluster.slurm.jobs.cell.sbatch_flags=[--hold]",
    "cluster.slurm.jobs.sft.sbatch_flags=[]",
)


def test_a_sweep_is_an_array_for_each_job_and_a_directory_for_each_run(
    cluster: Devcluster, run: Submitting
) -> None:
    submitted = run.submit(*SWEEP, *HELD, "trainer.parallel.dp=1")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    parent = run.paths.root.parent
    layouts = [RunPaths(parent / f"slurm-lr-{value}") for value in ("1e-3", "3e-3")]
    ids = [[one.job_id for one in read_submissions(paths.submissions)] for paths in layouts]
    sft = ids[0][0].partition("_")[0]
    assert [one[0] for one in ids] == [f"{sft}_0", f"{sft}_1"]
    assert all(one.endswith(f"_{index}") for index in (0, 1) for one in ids[index])
    waiting = cluster.slurm("squeue", "-h", "--array", "-t", "PD", "-o", "%E").splitlines()
    assert sum(f"aftercorr:{sft}" in line for line in waiting) >= 6
    wait_for(lambda: all(paths.sft_export.exists() for paths in layouts), 200)
    finals = [read_lines(paths.sft_metrics)[-1]["loss"] for paths in layouts]
    assert finals[0] != finals[1]
    # Each run's own script works under another number, outside of the array.
    alone = layouts[1].jobs_dir / "sft" / "job.sbatch"
    job = cluster.slurm("sbatch", "--parsable", "--partition=priority", str(alone))
    wait_for(lambda: cluster.job_state(job) not in {"PENDING", "RUNNING", "COMPLETING"}, 60)
    assert cluster.job_state(job) == "COMPLETED"


def test_scripts_of_a_site_pass_the_clusters_own_check(
    cluster: Devcluster, run: Submitting
) -> None:
    """The site that fits the emulated cluster but for its names and its processors."""
    shown = run.call(
        *("submit", "tests/golden/slurm/recipe.yaml", "--dry-run", "--site"),
        *("slurm/sites/plain.yaml", "cluster.slurm.partition=priority"),
        *("trainer.parallel.dp=2", "cluster.slurm.jobs.trainer.cpus_per_task=1"),
        "cluster.slurm.jobs.cell.cpus_per_task=16",
    )
    assert shown.returncode == 0, shown.stderr
    scripts = [part.partition(" <==\n")[2] for part in shown.stdout.split("\n==> ")]
    scripts = [script for script in scripts if script.startswith("#!")]
    assert len(scripts) == 3
    for script in scripts:
        checked = subprocess.run(
            ("sbatch", "--test-only"),
            input=script,
            env=cluster.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr
        assert "to start at" in checked.stderr


def test_the_plain_scripts_start_a_run_that_is_only_written_down(
    cluster: Devcluster, run: Submitting, tmp_path: Path
) -> None:
    written = run.submit("--write-only")
    assert written.returncode == 0, written.stdout + written.stderr
    assert run.submissions == []

    def sbatch(name: str, *arguments: str) -> str:
        command = ("sbatch", "--parsable", f"--chdir={CHECKOUT}", f"--output={tmp_path}/{name}.out")
        return cluster.slurm(*command, str(CHECKOUT / "slurm" / f"{name}.sbatch"), *arguments)

    root = str(run.paths.root)
    sft = sbatch("sft", root)
    wait_for(lambda: cluster.job_state(sft) not in {"PENDING", "RUNNING", "COMPLETING"}, 120)
    assert cluster.job_state(sft) == "COMPLETED"
    trainer, cell = sbatch("trainer", root), sbatch("cell", root, "0")
    found = [run.paths.rendezvous_dir / f"{name}.json" for name in ("ledger", "proxy-cell-0")]
    wait_for(lambda: all(path.exists() for path in found), 100)
    assert {cluster.job_state(job) for job in (trainer, cell)} == {"RUNNING"}
