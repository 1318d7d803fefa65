"""A run whose jobs are steps of an allocation that somebody holds."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from areal_hpc.rundir.allocation_note import AllocationNote, find_live_allocation
from areal_hpc.rundir.checkpoints import find_latest
from areal_hpc.rundir.jsonl import read_lines
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import PROGRAM, areal_hpc, audit_of, said_by
from tests.support.devclusters import SLURM_POLL_S, Devcluster
from tests.support.environments import CHECKOUT
from tests.support.small_run import CUT_DOWN, LIGHT, processes_of
from tests.support.waiting import wait_for

SALLOC = ("salloc", "--partition=priority", "--ntasks-per-node=1", "--cpus-per-task=4")
TWO_NODES = ("--nodes=2", "--mem=6000M", "--gpus-per-node=2")
ONE_NODE = ("--nodes=1", "--mem=6000M", "--gpus-per-node=2")
RECIPE = ("recipes/quickstart.yaml", "--in-allocation", "trainer.parallel.dp=1")
NO_END = 5000
"""Steps that no test waits for."""
LEAD_S = 22
"""Time that the launcher needs before the allocation's end: the recipe's grace, and a margin."""


class HeldRun:
    """`areal-hpc run --in-allocation` in allocations, one after the other."""

    def __init__(self, cluster: Devcluster, fileroot: Path) -> None:
        self.cluster = cluster
        self.paths = RunPaths(fileroot / "quickstart" / "demo")
        self._fileroot = fileroot
        self._log = fileroot / "said.log"
        fileroot.mkdir()
        self.salloc: subprocess.Popen[str] | None = None

    @contextmanager
    def hold(self, *options: str) -> Iterator[None]:
        """An allocation in which the run goes on; `options` of salloc first, then overrides."""
        shape = [one for one in options if one.startswith("--")]
        sizes = (
            *CUT_DOWN,
            *LIGHT,
            "evaluation.every_steps=0",
            f"cluster.fileroot={self._fileroot}",
        )
        overrides = [one for one in options if one not in shape]
        with self._log.open("a") as log:
            self.salloc = subprocess.Popen(
                [*SALLOC, *shape, *PROGRAM, "run", *RECIPE, *sizes, *overrides],
                cwd=CHECKOUT,
                env=self.cluster.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            yield
        finally:
            if self.salloc.poll() is None:
                self.salloc.terminate()
            self.salloc.wait(60)

    def said(self) -> str:
        return self._log.read_text()

    def end(self, timeout_s: float) -> int:
        """The exit code of the command, which salloc hands on."""
        assert self.salloc is not None
        return self.salloc.wait(timeout_s)

    def read_note(self) -> AllocationNote:
        note = find_live_allocation(self.paths)
        assert note is not None, self.said()
        return note

    def read_steps(self) -> list[int]:
        return [row["step"] for row in read_lines(self.paths.metrics)]

    def await_true(self, condition: Callable[[], object], timeout_s: float = 200) -> None:
        def is_reached() -> object:
            assert self.salloc is not None
            assert self.salloc.poll() is None, self.said()
            return condition()

        wait_for(is_reached, timeout_s, self.said)

    def await_training(self, steps: int) -> None:
        self.await_true(lambda: len(self.read_steps()) >= steps)

    def find_supervisors(self, job: str) -> list[psutil.Process]:
        """Tasks of a job's step: not srun, whose command line ends alike."""
        launch = str(self.paths.job(job).launch)
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            if words[-1:] == [launch] and words[0] != "srun":
                found.append(process)
        return found

    def find_launcher(self) -> psutil.Process:
        assert self.salloc is not None
        [launcher] = psutil.Process(self.salloc.pid).children()
        return launcher

    def get_gpus(self, job: str) -> str:
        """GPUs that Slurm shows the step of a job."""
        [supervisor] = self.find_supervisors(job)
        return supervisor.environ()["CUDA_VISIBLE_DEVICES"]

    def find_step_id(self, step: str) -> str:
        shown = self.cluster.slurm("squeue", "--steps", "-h", "-o", "%j %i")
        return dict(line.split() for line in shown.splitlines())[step]

    def await_nothing_left(self) -> None:
        wait_for(lambda: processes_of(self.paths.root) == [], 60, self.said)
        wait_for(lambda: self.cluster.slurm("squeue", "-h") == "", every_s=SLURM_POLL_S)
        assert not self.paths.allocation.exists()

    def why(self) -> str:
        return said_by(areal_hpc("why", self.paths.root, environ=self.cluster.environ))


@pytest.mark.timeout(400)
def test_steps_that_die_are_started_again_and_another_allocation_goes_on_after_the_time_limit(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = HeldRun(cluster, tmp_path / "runs")
    with run.hold(*TWO_NODES, f"trainer.total_steps={NO_END}"):
        run.await_training(1)
        note = run.read_note()
        assert {step.job: step.nodes for step in note.steps} == {
            "trainer": ("n01",),
            "cell-0": ("n02",),
        }
        status = areal_hpc("status", run.paths.root, environ=cluster.environ)
        assert f"running in allocation {note.job_id}" in status.stdout
        for supervisor in run.find_supervisors("cell-0"):
            supervisor.kill()
        run.await_true(lambda: "cell-0.2" in {step.step for step in run.read_note().steps})
        before = len(run.read_steps())
        run.await_training(before + 2)
        ends_at = datetime.now() + timedelta(seconds=LEAD_S + 5)
        update = ("scontrol", "update", f"JobId={note.job_id}")
        cluster.slurm(*update, f"EndTime={ends_at:%Y-%m-%dT%H:%M:%S}")
        assert run.end(100) == 75, run.said()
    said = run.said()
    assert "cell-0 ended without an exit status; this job is started again" in said
    assert f"error: allocation {note.job_id} is close to its time limit" in said
    run.await_nothing_left()
    assert f"the run was stopped: allocation {note.job_id} is close to its time" in run.why()

    last = run.read_steps()[-1]
    saved = find_latest(run.paths.checkpoints_dir)
    assert saved is not None
    assert saved.state.step == last  # no step is taken twice
    with run.hold(*ONE_NODE, f"trainer.total_steps={last + 6}"):
        run.await_true(lambda: run.find_supervisors("cell-0"))
        assert {job: run.get_gpus(job) for job in ("trainer", "cell-0")} == {
            "trainer": "0",
            "cell-0": "1",
        }
        run.await_training(last + 1)
        cluster.slurm("scancel", run.find_step_id("cell-0.3"))
        assert run.end(200) == 0, run.said()
    assert re.search(r"cell-0 .*; this job is started again", run.said().removeprefix(said))
    assert run.read_steps() == list(range(1, last + 7))
    assert f"trained_once={4 * (last + 6)} duplicates=0 lost=0" in audit_of(run.paths.root)
    run.await_nothing_left()


def test_ctrl_c_and_scancel_leave_nothing_and_say_so(cluster: Devcluster, tmp_path: Path) -> None:
    run = HeldRun(cluster, tmp_path / "runs")
    with run.hold(*TWO_NODES, f"sft.total_steps={NO_END}"):
        run.await_true(lambda: run.find_supervisors("sft"))
        os.killpg(os.getpgid(run.find_launcher().pid), signal.SIGINT)  # as a terminal does
        assert run.end(60) == 130, run.said()
    run.await_nothing_left()
    with run.hold(*ONE_NODE, f"sft.total_steps={NO_END}"):
        run.await_true(lambda: run.find_supervisors("sft"))
        cluster.slurm("scancel", run.read_note().job_id)
        assert run.end(60) != 0, run.said()
    run.await_nothing_left()
    why = run.why()
    assert "the run was stopped" in why
    assert "was ended (Slurm says" in why or "stopped by SIG" in why
