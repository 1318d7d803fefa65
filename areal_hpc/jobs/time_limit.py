"""Time limit of a Slurm job: when to stop so that a checkpoint still fits."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.paths import JobPaths
from areal_hpc.slurm import scontrol

log = logging.getLogger(__name__)

CHECKPOINT_DURATION_FILE_VARIABLE = "AREAL_HPC_CHECKPOINT_TIME_FILE"
"""Variable that names the file for `record_checkpoint_duration`."""


class SlurmControllerClock:
    """slurmctld's clock, by which it ends jobs: a node's own may be off by many seconds.

    It is asked once, as this is made; if it does not answer the node's own clock must do.
    """

    def __init__(self) -> None:
        try:
            now = scontrol.read_controller_time()
        except ClusterError as error:
            log.warning("slurmctld did not tell the time: %s", error)
            now = None
        self._ahead_s = (time.time() if now is None else now) - time.monotonic()

    def now(self) -> float:
        return self._ahead_s + time.monotonic()


def find_end_time(environ: Mapping[str, str]) -> float | None:
    """Time at which Slurm ends this job, by its clock; None if there is no limit or none is known.

    Newer Slurms tell every job; others are asked, once.
    """
    told = environ.get("SLURM_JOB_END_TIME", "")
    if told.isdecimal():
        return float(told)
    try:
        return scontrol.query_job(environ["SLURM_JOB_ID"]).ends_at
    except ClusterError:
        return None


def record_checkpoint_duration(seconds: float) -> None:
    """For a process of a job: say how long its last save took. Without a supervisor: nothing.

    Nothing ends for want of it: the time of the save before still stands.
    """
    if path := os.environ.get(CHECKPOINT_DURATION_FILE_VARIABLE):
        try:
            write_atomic(Path(path), f"{seconds:.3f}".encode())
        except OSError as error:
            log.warning("how long the last save took cannot be written: %s", error)


def read_checkpoint_duration_s(job: JobPaths) -> float:
    """Seconds that the job's last save took; 0 before the first, and where nobody can tell.

    Jobs are stopped even while the storage is away.
    """
    try:
        return float(job.checkpoint_duration.read_text())
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError) as error:
        log.warning("how long the last save took cannot be read: %s", error)
        return 0.0
