"""A run whose jobs are steps of an allocation that the user holds."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.lock import AllocationNote, find_live_launcher_note
from tests.support.commands import areal_hpc, said_by
from tests.support.deadlines import scaled
from tests.support.devclusters import SLURM_POLL_S, Devcluster
from tests.support.process_commands import command_of, find_processes
from tests.support.small_run import LIGHT, SmallRun, await_none_left
from tests.support.waiting import wait_for

SALLOC = ("salloc", "--partition=priority", "--ntasks-per-node=1", "--cpus-per-task=4")
TWO_NODES = ("--nodes=2", "--mem=6000M", "--gpus-per-node=2")
ONE_NODE = ("--nodes=1", "--mem=6000M", "--gpus-per-node=2")
LOOK_PERIOD_S = 15
STOP_GRACE_S = scaled(6)
LEAD_S = scaled(24)
"""Time of the launcher before an allocation's end: the grace below, 10 s, a save, and some."""
SMALL = (
    *("--in-allocation", "trainer.parallel.dp=1"),
    *(*LIGHT, "sft.total_steps=5", "evaluation.every_steps=0"),
    # It has learned next to nothing, which `why` would name besides the reason for a stop.
    "alerts.off=[no_signal]",
    # Steps ask for GPUs then, as many as there would be with CUDA; what computes has processors.
    *("trainer.device=auto", f"cluster.stop_grace_s={STOP_GRACE_S}"),
)
NO_END = 5000
"""Steps that no test waits for."""


class HeldRun(SmallRun):
    def __init__(self, cluster: Devcluster, fileroot: Path, *overrides: str) -> None:
        super().__init__(fileroot, *SMALL, *overrides)
        self.cluster = cluster
        self.environ = cluster.environ

    @contextmanager
    def hold(self, *options: str) -> Iterator[None]:
        """An allocation in which the run goes on; `options` of salloc first, then overrides."""
        shape = [option for option in options if option.startswith("--")]
        self.before = (*SALLOC, *shape)
        self.override(*options[len(shape) :])
        self.start()
        assert self.process is not None
        try:
            yield
        finally:
            if self.process.poll() is None:
                self.process.terminate()
            self.process.wait(scaled(60))

    def read_note(self) -> AllocationNote:
        note = find_live_launcher_note(self.paths)
        assert note is not None, self.said()
        return note

    def read_steps(self) -> list[int]:
        return [row["step"] for row in read_readable_records(self.paths.metrics)]

    def await_training(self, steps: int) -> None:
        self.await_true(lambda: len(self.read_steps()) >= steps)

    def find_supervisors(self, job: str) -> list[psutil.Process]:
        """Find the tasks of a job's step, without srun, whose command line ends alike."""
        launch = str(self.paths.job(job).launch)
        words = {p: command_of(p) for p in find_processes(launch)}
        return [p for p, its in words.items() if its[-1:] == [launch] and its[0] != "srun"]

    def press_ctrl_c(self) -> float:
        assert self.process is not None
        began = time.monotonic()
        [launcher] = psutil.Process(self.process.pid).children()
        os.killpg(os.getpgid(launcher.pid), signal.SIGINT)
        assert self.wait() == 130, self.said()
        return time.monotonic() - began

    def get_gpus(self, job: str) -> str:
        [supervisor] = self.find_supervisors(job)
        return str(supervisor.environ()["CUDA_VISIBLE_DEVICES"])

    def shorten_time_limit(self) -> None:
        """End the allocation as soon as the launcher is sure to see it in time."""
        ends_at = datetime.now() + timedelta(seconds=LOOK_PERIOD_S + LEAD_S)
        update = ("scontrol", "update", f"JobId={self.read_note().job_id}")
        self.cluster.slurm(*update, f"EndTime={ends_at:%Y-%m-%dT%H:%M:%S}")

    def cancel_step(self, step: str) -> None:
        shown = self.cluster.slurm("squeue", "--steps", "-h", "-o", "%j %i")
        self.cluster.slurm("scancel", dict(line.split() for line in shown.splitlines())[step])

    def await_step(self, step: str) -> None:
        def is_noted() -> bool:
            note = find_live_launcher_note(self.paths)
            return note is not None and step in {line.step for line in note.steps}

        self.await_true(is_noted)
        self.await_true(lambda: bool(self.find_supervisors(step.partition(".")[0])))

    def await_nothing_left(self) -> None:
        await_none_left(self, 60)
        wait_for(lambda: self.cluster.slurm("squeue", "-h") == "", every_s=SLURM_POLL_S)
        assert not self.paths.allocation_note.exists()

    def why(self) -> str:
        return said_by(areal_hpc("why", self.paths.root, environ=self.cluster.environ))
