"""scontrol calls of jobs: show, requeue, release, exclude, redirect.

All that ask Slurm raise SlurmNotFoundError, SlurmTimeoutError or SlurmCommandError of `commands`.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_hpc.errors import ClusterError
from areal_hpc.slurm.commands import parse_slurm_timestamp, run_slurm_command

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 1.0
RUNNING_STATE = "RUNNING"
"""The one state in which a job may decide about itself: otherwise Slurm has decided already."""
_STRIPPED_ENV_PREFIXES = (
    "SLURM_",
    "SBATCH_",
    "SUBMITIT_",
    "AREAL_HPC_",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_",
)
"""Variables of a running job that would be taken for wishes of the job that it submits."""
_CONTROLLER_TIME_PATTERN = re.compile(r"Configuration data as of (\S+)")
_SLURM_USER_PATTERN = re.compile(r"^SlurmUser\s*=\s*\S*\((\d+)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class JobFacts:
    """State of one job as Slurm reports it."""

    state: str
    ends_at: float | None
    """Unix time at which Slurm ends it: its time limit, or the end of a preemption's grace."""
    excluded_nodes: str
    """Slurm's notation of the nodes that it must not get; empty if there are none."""
    is_preempted: bool = False
    """A job of higher priority gets its nodes when its grace is over."""
    is_requeueable: bool = True
    """Slurm may start it again under its number; not so with sbatch's --no-requeue."""


def parse_job_facts(scontrol_line: str) -> JobFacts:
    """Read one line of `scontrol show job --oneliner`."""
    facts = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", scontrol_line))
    excluded = facts.get("ExcNodeList", "")
    return JobFacts(
        state=facts.get("JobState", ""),
        ends_at=parse_slurm_timestamp(facts.get("EndTime", "")),
        excluded_nodes="" if excluded == "(null)" else excluded,
        is_preempted=facts.get("PreemptTime", "None") not in ("None", "Unknown"),
        is_requeueable=facts.get("Requeue") != "0",
    )


def query_job(job_id: str) -> JobFacts:
    return parse_job_facts(_run("scontrol", "show", "job", job_id, "--oneliner"))


def read_controller_time() -> float | None:
    """Unix time by slurmctld's own clock; None if this Slurm does not tell it."""
    shown = _run("scontrol", "show", "config")
    found = _CONTROLLER_TIME_PATTERN.match(shown)
    return parse_slurm_timestamp(found[1]) if found else None


def read_slurm_user_id() -> int | None:
    shown = _run("scontrol", "show", "config")
    found = _SLURM_USER_PATTERN.search(shown)
    return int(found[1]) if found else None


def control_job(action: Literal["requeue", "release"], job_id: str) -> None:
    _run("scontrol", action, job_id)


def cancel_job(job_id: str) -> None:
    _run("scancel", job_id)


def update_waiting_job(
    job_id: str, field: Literal["ExcNodeList", "Dependency"], value: str
) -> None:
    _run("scontrol", "update", f"JobId={job_id}", f"{field}={value}")


def read_pending_dependencies() -> dict[str, str]:
    """This user's jobs in the queue, and what each waits for, in sbatch's words."""
    shown = _run("squeue", "--me", "--array", "--noheader", "--states=PENDING", "--format=%i %E")
    plain = re.sub(r"\([^)]*\)", "", shown)  # squeue adds how far each condition is met
    return dict(line.partition(" ")[::2] for line in plain.splitlines())


def read_reasons_of_drained_nodes(nodes: Sequence[str]) -> dict[str, str]:
    """Why Slurm, or an administrator, took nodes out of service; those of `nodes` that are."""
    shown = _run(
        *("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}"),
        *("--states=drain,down,fail", "--format=%N|%E"),
    )
    return dict(line.strip().partition("|")[::2] for line in shown.splitlines())


def retry_and_log(command: Callable[[], None], times: int = 3) -> None:
    """Repeat a command that Slurm does not take at once; what it says is logged, and no error."""
    for _ in range(times):
        try:
            return command()
        except ClusterError as error:
            log.warning("%s", error)
            time.sleep(RETRY_PAUSE_S)


def strip_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """A job's environment without what Slurm's commands would take for wishes."""
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(_STRIPPED_ENV_PREFIXES)
    }


def _run(*command: str) -> str:
    return run_slurm_command(*command, environ=strip_job_variables(os.environ))
