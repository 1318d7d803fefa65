"""Time limit of a Slurm job: when to stop so that a checkpoint still fits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from areal_hpc.errors import SlurmCommandError, SlurmNotFoundError, SlurmTimeoutError
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.paths import JobPaths
from areal_hpc.slurm import scontrol

_CHECKPOINT_TIME_VARIABLE = "AREAL_HPC_CHECKPOINT_TIME_FILE"


def read_end_time(environ: Mapping[str, str]) -> float | None:
    """Unix time at which Slurm ends this job; None where it has no limit or none can be found.

    Newer Slurms tell every job; others are asked, once.
    """
    told = environ.get("SLURM_JOB_END_TIME", "")
    if re.fullmatch(r"\d+", told):
        return float(told)
    try:
        return scontrol.show_job(scontrol.get_own_job_id(environ)).ends_at
    except (SlurmNotFoundError, SlurmTimeoutError, SlurmCommandError):
        return None


def compute_stop_lead_s(stop_grace_s: float, margin_s: float, job: JobPaths) -> float:
    """How long before its end a job has to be told to stop: also for what its last save took.

    Args:
        stop_grace_s: For the step in flight and for all that must be put away.
        margin_s: Kept free, for the requeue and because Slurm's clock is coarse.
        job: Its folder.
    """
    return stop_grace_s + margin_s + read_checkpoint_time_s(job)


def get_checkpoint_time_variable(job: JobPaths) -> dict[str, str]:
    """Environment that a job's processes need for `record_checkpoint_time`."""
    return {_CHECKPOINT_TIME_VARIABLE: str(job.checkpoint_time)}


def record_checkpoint_time(seconds: float) -> None:
    """For a process of a job: say how long its last save took. Without a supervisor: nothing."""
    if path := os.environ.get(_CHECKPOINT_TIME_VARIABLE):
        write_atomic(Path(path), f"{seconds:.3f}".encode())


def read_checkpoint_time_s(job: JobPaths) -> float:
    """Seconds that the job's last save took; 0 before the first."""
    try:
        return float(job.checkpoint_time.read_text())
    except FileNotFoundError:
        return 0.0
