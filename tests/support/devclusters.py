"""Devcluster in a user's hands: through its command line, then through Slurm's."""

import json
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from areal_hpc.rundir.jobs import Submission, get_latest_submissions, read_submissions
from areal_hpc.rundir.paths import RunPaths
from slurm.devcluster.host import lock_host
from slurm.devcluster.roots import find_slurm_root, get_programs_dir
from tests.support.commands import areal_hpc, run_program, said_by, start_areal_hpc
from tests.support.deadlines import scaled
from tests.support.process_commands import command_of, find_processes
from tests.support.small_run import SIZES
from tests.support.waiting import wait_for

NETWORK_LINKS = Path("/sys/class/net")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
TESTED_RELEASE = os.environ.get("TESTS_SLURM", "")
"""Release of Slurm that tests run on, one of `PROVEN_RELEASES`; empty for the machine's own."""
SLURM_POLL_S = 0.2
"""Time between two questions to Slurm: each is a process of its own."""


@dataclass(frozen=True)
class Devcluster:
    state_dir: Path
    user: str = ""
    """User of Slurm's commands; empty: the user of the tests. See `as_user`."""

    def as_user(self, name: str) -> "Devcluster":
        return replace(self, user=name)

    def give_to_user(self, *paths: Path) -> None:
        for path in paths:
            if self.user:
                shutil.chown(path, self.user)

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.state_dir / "etc" / "slurm.conf")}

    @property
    def _made_of(self) -> Path:
        return self.state_dir / "cluster.json"

    def links_and_groups(self) -> list[Path]:
        """Network links and control groups that are this cluster's; on loopback there are none."""
        made_of = json.loads(self._made_of.read_text())
        if not made_of["settings"]["namespaces"]:
            return []
        network = made_of["facts"]["network"]
        bridge = f"areal-dc{network}"
        links = [NETWORK_LINKS / bridge, *NETWORK_LINKS.glob(f"adc{network}-*")]
        return [path for path in (*links, *CONTROL_GROUPS.glob(f"*/{bridge}")) if path.exists()]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return areal_hpc("devcluster", *arguments, "--state-dir", self.state_dir)

    def done(self, *arguments: str) -> str:
        return said_by(self.command(*arguments))

    def slurm(self, *command: str) -> str:
        return said_by(run_program(*self._become_user, *command, environ=self.environ)).strip()

    @property
    def _become_user(self) -> tuple[str, ...]:
        if not self.user:
            return ()
        group = pwd.getpwnam(self.user).pw_gid
        return ("setpriv", f"--reuid={self.user}", f"--regid={group}", "--clear-groups", "--")

    def submit(self, script: str, *options: str) -> str:
        output = (f"--output={self.state_dir}/%j.out", "--open-mode=append")
        return self.slurm("sbatch", "--parsable", *output, *options, f"--wrap={script}")

    def output(self, job: str) -> list[str]:
        path = self.state_dir / f"{job}.out"
        return path.read_text().splitlines() if path.exists() else []

    def job_state(self, job: str) -> str:
        return self.slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def restarts(self, job: str) -> int:
        shown = self.slurm("scontrol", "show", "job", job, "--oneliner")
        return int(shown.split(" Restarts=")[1].split()[0])

    def await_state(self, job: str, *states: str) -> None:
        wait_for(lambda: self.job_state(job) in states, every_s=SLURM_POLL_S)

    def await_end(self, job: str) -> str:
        under_way = {"PENDING", "RUNNING", "COMPLETING"}
        wait_for(lambda: self.job_state(job) not in under_way, 120, every_s=SLURM_POLL_S)
        return self.job_state(job)

    def await_output(self, job: str, count: int) -> list[str]:
        wait_for(lambda: len(self.output(job)) >= count, every_s=SLURM_POLL_S)
        return self.output(job)

    def cancel_all(self) -> None:
        self.slurm("scancel", "--partition=scavenger")
        self.slurm("scancel", "--partition=priority")
        wait_for(lambda: self.slurm("squeue", "-h") == "", every_s=SLURM_POLL_S)

    def restore(self) -> None:
        self.cancel_all()
        if self.slurm("sinfo", "-h", "-p", "priority", "-o", "%T") != "idle":
            self.done("up")

    def node_state(self, node: str) -> str:
        listed = self.slurm("sinfo", "-h", f"--nodes={node}", "-p", "scavenger", "-o", "%T")
        return listed.rstrip("*")

    def down(self) -> None:
        """Take it down if it is there; nothing of it may be left."""
        if not self._made_of.exists():
            return
        its_own = self.links_and_groups()
        # Else another cluster could have its network before the look at what is left.
        with lock_host():
            self.done("down")
            assert [path for path in its_own if path.exists()] == []
        wait_for(lambda: self.traces() == [], 60)  # an srun of ours ends with its job, not with it

    def traces(self) -> list[str]:
        traces = [str(self.state_dir)] if self.state_dir.exists() else []
        left = find_processes(self.state_dir, in_environment=True)
        return [*traces, *(f"{process.pid}: {command_of(process)}" for process in left)]


@contextmanager
def devcluster(
    state_dir: Path, *options: str, release: str = TESTED_RELEASE
) -> Iterator[Devcluster]:
    """A cluster that is up, and of which afterwards nothing is left.

    Slurm's commands are meanwhile those of its `release`, in this process too.
    """
    cluster = Devcluster(state_dir)
    chosen = (f"--slurm={release}",) if release else ()
    root, path = find_slurm_root(release), os.environ["PATH"]
    try:
        if root:
            os.environ["PATH"] = f"{get_programs_dir(root)}:{path}"
        cluster.done("up", f"--timeout-s={scaled(60):.0f}", *chosen, *options)
        yield cluster
    finally:
        cluster.down()
        os.environ["PATH"] = path


CUT_DOWN = (*SIZES, "sft.total_steps=20", "evaluation.every_steps=0", "trainer.total_steps=5")


class Submitting:
    """`areal-hpc` in the environment of a cluster, for one run directory."""

    def __init__(self, cluster: Devcluster, fileroot: Path) -> None:
        self._cluster = cluster
        self._fileroot = fileroot
        self.paths = RunPaths(fileroot / "quickstart" / "slurm")

    def call(self, *arguments: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
        return areal_hpc(*arguments, environ=self._cluster.environ, timeout_s=timeout_s)

    def submit(self, *options: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
        return self.call("submit", *self._recipe, *options, timeout_s=timeout_s)

    def start(self, *options: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        environ = self._cluster.environ
        return start_areal_hpc("submit", *self._recipe, *options, environ=environ, before=before)

    @property
    def _recipe(self) -> tuple[str, ...]:
        return ("recipes/quickstart_slurm.yaml", f"cluster.fileroot={self._fileroot}", *CUT_DOWN)

    @property
    def submissions(self) -> list[Submission]:
        return read_submissions(self.paths.submissions)


HELD = ("cluster.slurm.sbatch.hold=true", "cluster.slurm.sbatch.mem=100M")
"""Settings of jobs that are submitted and not to run."""


def light_overrides(folder: Path) -> tuple[str, ...]:
    """Settings of a run that nobody waits for: tasks in files, an agent with few imports."""
    tasks = folder / "tasks.jsonl"
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    tasks.write_text(f"{json.dumps({'messages': messages})}\n" * 64)
    keys = ("train_dataset", "valid_dataset", "sft.dataset")
    return (
        "rollout.workflow=tests.slurm.job_actors.IdleAgent",
        *(f"{key}={{path: {tasks}, generator: null, kwargs: {{}}}}" for key in keys),
    )


JOBS = ["caretaker", "cell-0", "cell-1", "sft", "trainer"]


@contextmanager
def stopped_slurmctld(cluster: Devcluster) -> Iterator[None]:
    """slurmctld takes requests and answers none, until the end of the block."""
    controller = int((cluster.state_dir / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(controller, signal.SIGCONT)


def queued(cluster: Devcluster) -> list[str]:
    names = cluster.slurm("squeue", "-h", "-o", "%j").split()
    return sorted(name.removeprefix("quickstart-slurm-").rpartition(".")[0] for name in names)


def numbers(cluster: Devcluster) -> list[str]:
    return sorted(cluster.slurm("squeue", "-h", "-o", "%i").split())


def recorded(run: Submitting) -> dict[str, str]:
    return {job: row.job_id for job, row in get_latest_submissions(run.submissions).items()}
