"""A run as Slurm jobs: submitted at once from outside, spread over nodes, ended by itself."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jobs import read_submissions
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.chatml import TRAINING_TEXT
from tests.support.commands import audit_of, run_program, said_by
from tests.support.deadlines import scaled
from tests.support.devclusters import (
    HELD,
    JOBS,
    Devcluster,
    Submitting,
    light_overrides,
    recorded,
)
from tests.support.environments import CHECKOUT, python_of
from tests.support.killed_run import random_model
from tests.support.waiting import wait_for


@pytest.fixture
def run(cluster: Devcluster, tmp_path: Path) -> Submitting:
    return Submitting(cluster, tmp_path / "runs")


@pytest.fixture
def light(tmp_path: Path) -> tuple[str, ...]:
    return light_overrides(tmp_path)


@pytest.mark.timeout(600)
def test_a_run_all_of_whose_jobs_slurm_ends_in_one_second_trains_on_by_itself(
    cancelling: Devcluster, run: Submitting, tmp_path: Path
) -> None:
    """Over three nodes, in a partition where preempted jobs are cancelled at once."""
    at_risk = ("cluster.slurm.partition=scavenger", "trainer.checkpoint_every_steps=1")
    model = ("sft=null", "model.tiny=null", f"model.path={random_model(tmp_path / 'model')}")
    waiting = run.start("--wait", "trainer.total_steps=4", "inference.cells=1", *at_risk, *model)
    wait_for(lambda: len(read_readable_records(run.paths.metrics)) > 0, 300)
    cancelling.submit("sleep 5", "--partition=priority", "--exclusive", "--nodes=4")
    first = recorded(run)
    work = ("trainer", "cell-0")
    for job in work:
        cancelling.await_state(first[job], "PREEMPTED")
    output, _ = waiting.communicate(timeout=scaled(380))
    assert waiting.returncode == 0, output
    assert "step      4/4" in output
    again = recorded(run)
    assert set(again) == {"caretaker", *work}
    assert all(again[job] != first[job] for job in (*work, "caretaker"))
    assert {cancelling.job_state(again[job]) for job in work} == {"COMPLETED"}
    of_trainer = ("sacct", "-X", "-n", "-P", "-j", again["trainer"], "-o", "NNodes")
    assert cancelling.slurm(*of_trainer) == "2"
    assert "trained_once=16 duplicates=0 lost=0" in audit_of(run.paths.root)
    wait_for(lambda: cancelling.job_state(again["caretaker"]) == "CANCELLED")


def test_a_dry_run_touches_nothing(run: Submitting) -> None:
    assert said_by(run.submit("--dry-run")).count("#!/bin/bash") == len(JOBS)
    assert not run.paths.root.exists()


def test_who_waits_can_leave_and_nobody_submits_what_is_queued_until_it_is_cancelled(
    cluster: Devcluster, run: Submitting, light: tuple[str, ...]
) -> None:
    held, root = (*HELD, *light), str(run.paths.root)
    waiting = run.start("--wait", *held)
    wait_for(lambda: len(run.submissions) == len(JOBS))
    time.sleep(1)  # it watches now
    waiting.send_signal(signal.SIGINT)
    shown, _ = waiting.communicate(timeout=scaled(60))
    assert waiting.returncode == 130, shown
    assert "detached; jobs keep running" in shown
    first = [submission.job_id for submission in run.submissions]
    script = (run.paths.jobs_dir / "cell-1" / "job.sbatch").read_text()
    assert f"--dependency=afterok:{first[0]}" in script
    for again in (run.submit(*held), run.call("run", str(run.paths.recipe))):
        assert again.returncode == 75
        assert all(job_id in again.stderr for job_id in first)
    comments = cluster.slurm("squeue", "-h", "-o", "%k").splitlines()
    assert [comment.split(" token=")[0] for comment in comments] == [root] * len(JOBS)
    said_by(run.call("cancel", root))
    output = said_by(run.call("resume", root, "trainer.total_steps=7"))
    assert "changed  trainer.total_steps: 5 -> 7" in output
    second = cluster.slurm("squeue", "-h", "-o", "%i").split()
    assert len(second) == len(JOBS)
    assert set(second).isdisjoint(first)
    status = said_by(run.call("status", root))
    assert "quickstart/slurm: waiting" in status
    assert "step              0 of 7" in status


def test_scripts_of_a_site_pass_sbatchs_own_check(cluster: Devcluster, run: Submitting) -> None:
    """The site that fits the emulated cluster but for its names and its processors."""
    shown = said_by(
        run.call(
            *("submit", "tests/golden/slurm/recipe.yaml", "--dry-run", "--site"),
            *("slurm/sites/plain.yaml", "cluster.slurm.partition=priority"),
            *("trainer.parallel.dp=2", "cluster.slurm.jobs.trainer.sbatch.cpus-per-task=1"),
            "cluster.slurm.jobs.cell.sbatch.cpus-per-task=16",
        )
    )
    scripts = [part.partition(" <==\n")[2] for part in shown.split("\n==> ")]
    scripts = [
        re.sub(r"#SBATCH --dependency=.*\n", "", text) for text in scripts if text[:2] == "#!"
    ]
    assert len(scripts) == 4
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


@pytest.mark.thorough
def test_the_plain_scripts_start_a_run_that_is_only_written_down(
    cluster: Devcluster, run: Submitting, light: tuple[str, ...], tmp_path: Path
) -> None:
    said_by(run.submit("--write-only", *light))
    assert run.submissions == []

    def sbatch(name: str, *arguments: str) -> str:
        command = ("sbatch", "--parsable", f"--chdir={CHECKOUT}", f"--output={tmp_path}/{name}.out")
        script = CHECKOUT / "slurm" / f"{name}.sbatch"
        return cluster.slurm(*command, str(script), str(run.paths.root), *arguments)

    assert cluster.await_end(sbatch("sft")) == "COMPLETED"
    jobs = (sbatch("trainer"), sbatch("cell", "0"))
    endpoints = [run.paths.rendezvous_dir / f"{name}.json" for name in ("ledger", "proxy-cell-0")]
    wait_for(lambda: all(path.exists() for path in endpoints), 100)
    assert {cluster.job_state(job) for job in jobs} == {"RUNNING"}


FOLDER = CHECKOUT / "tests" / "integration" / "areal"
SITE = (
    "slurm: {time_limit_minutes: 10, sbatch: {mem: 4G, cpus-per-task: 1}, "
    "setup: [export OMP_NUM_THREADS=1]}\n"
)


@pytest.mark.timeout(500)
@pytest.mark.thorough
def test_a_script_submits_its_run_and_shows_progress(cluster: Devcluster, tmp_path: Path) -> None:
    model_dir, site = tmp_path / "model", tmp_path / "site.yaml"
    make_tiny_model(model_dir, TRAINING_TEXT * 20, seed=5, max_position_embeddings=1024)
    site.write_text(SITE)
    output = said_by(
        run_program(
            *(python_of("main"), "-m", "areal_hpc.areal", FOLDER / "script.py"),
            *("--config", FOLDER / "config.yaml", "trial_name=slurm"),
            *(f"cluster.fileroot={tmp_path / 'runs'}", f"actor.path={model_dir}"),
            *("scheduler.type=slurm", f"scheduler.site={site}"),
            environ={**cluster.environ, "PYTHONPATH": str(CHECKOUT)},
            timeout_s=400,
        )
    )
    paths = RunPaths(tmp_path / "runs" / "areal" / "slurm")
    assert "step      2/2" in output
    *submitted, caretaker = read_submissions(paths.submissions)
    assert [row.job for row in (*submitted, caretaker)] == ["trainer", "cell-0", "caretaker"]
    assert {cluster.job_state(row.job_id) for row in submitted} == {"COMPLETED"}
    assert [row["step"] for row in read_readable_records(paths.metrics)] == [0, 1, 2]
