"""A run whose jobs are steps of an allocation that somebody holds."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from areal_hpc.rundir.allocation_note import find_live_allocation
from areal_hpc.rundir.jsonl import read_lines
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, audit_of, said_by
from tests.support.devclusters import SLURM_POLL_S, Devcluster
from tests.support.environments import CHECKOUT
from tests.support.small_run import CUT_DOWN, LIGHT, processes_of
from tests.support.waiting import wait_for

SALLOC = ("salloc", "--partition=priority", "--nodes=2", "--ntasks-per-node=1", "--mem=6000M")
RECIPE = ("recipes/quickstart.yaml", "--in-allocation", "trainer.parallel.dp=1")


@contextmanager
def held_run(
    cluster: Devcluster, fileroot: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`areal-hpc run --in-allocation` under salloc, and the file of what it prints."""
    fileroot.mkdir()
    said = fileroot / "said.log"
    command = [*SALLOC, "--cpus-per-task=4", sys.executable, "-m", "areal_hpc", "run", *RECIPE]
    sizes = (*CUT_DOWN, *LIGHT, "evaluation.every_steps=0", f"cluster.fileroot={fileroot}")
    with said.open("w") as log:
        process = subprocess.Popen(
            [*map(str, command), *sizes, *options],
            cwd=CHECKOUT,
            env=cluster.environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process, said
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def find_supervisors(paths: RunPaths, job: str) -> list[psutil.Process]:
    """Tasks of a job's step: not srun, whose command line ends alike."""
    launch = str(paths.job(job).launch)
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if words[-1:] == [launch] and words[0] != "srun":
            found.append(process)
    return found


@pytest.mark.timeout(300)
def test_a_run_trains_as_steps_of_a_held_allocation_and_survives_the_death_of_a_cells_step(
    cluster: Devcluster, tmp_path: Path
) -> None:
    fileroot = tmp_path / "runs"
    paths = RunPaths(fileroot / "quickstart" / "demo")
    with held_run(cluster, fileroot, "trainer.total_steps=12") as (process, said):

        def is_trained(step: int) -> bool:
            assert process.poll() is None, said.read_text()
            rows = read_lines(paths.metrics)
            return bool(rows) and rows[-1]["step"] >= step

        wait_for(lambda: is_trained(1), 200, said.read_text)
        note = find_live_allocation(paths)
        assert note is not None
        nodes = {step.job: step.nodes for step in note.steps}
        assert nodes == {"trainer": ("n01",), "cell-0": ("n02",)}
        status = areal_hpc("status", paths.root, environ=cluster.environ)
        assert f"running in allocation {note.job_id}" in status.stdout
        for supervisor in find_supervisors(paths, "cell-0"):
            supervisor.kill()
        assert process.wait(200) == 0, said.read_text()
    assert "cell-0 ended without an exit status; this job is started again" in said.read_text()
    assert [row["step"] for row in read_lines(paths.metrics)][-1] == 12
    assert "trained_once=48 duplicates=0 lost=0" in audit_of(paths.root)
    assert not paths.allocation.exists()
    wait_for(lambda: processes_of(paths.root) == [], 30)
    assert cluster.slurm("squeue", "-h") == ""


def test_an_allocation_that_is_cancelled_leaves_nothing_and_why_names_it(
    cluster: Devcluster, tmp_path: Path
) -> None:
    fileroot = tmp_path / "runs"
    paths = RunPaths(fileroot / "quickstart" / "demo")
    with held_run(cluster, fileroot, "sft.total_steps=5000") as (process, said):
        wait_for(lambda: bool(find_supervisors(paths, "sft")), 100, said.read_text)
        job = cluster.slurm("squeue", "-h", "-o", "%i")
        cluster.slurm("scancel", job)
        assert process.wait(60) != 0, said.read_text()
    wait_for(lambda: cluster.slurm("squeue", "-h") == "", every_s=SLURM_POLL_S)
    wait_for(lambda: processes_of(paths.root) == [], 60, said.read_text)
    why = areal_hpc("why", paths.root, environ=cluster.environ)
    assert "the run was stopped" in said_by(why)
    assert "was ended (Slurm says" in why.stdout or "stopped by SIG" in why.stdout
