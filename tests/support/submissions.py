"""Jobs of a run as Slurm and the run directory have them, and a slurmctld that does not answer."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from areal_hpc.rundir.jobs import get_latest_submissions
from tests.support.devclusters import Devcluster, Submitting

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
    """Names within the run of the jobs in the queue."""
    names = cluster.slurm("squeue", "-h", "-o", "%j").split()
    return sorted(name.removeprefix("quickstart-slurm-").rpartition(".")[0] for name in names)


def numbers(cluster: Devcluster) -> list[str]:
    """Numbers of the jobs in the queue."""
    return sorted(cluster.slurm("squeue", "-h", "-o", "%i").split())


def recorded(run: Submitting) -> dict[str, str]:
    """Number of the newest submission of each job."""
    return {job: one.job_id for job, one in get_latest_submissions(run.submissions).items()}
