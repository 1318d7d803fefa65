"""Calls of scontrol: facts of jobs, nodes and the current allocation; requeue and release.

Functions that call Slurm raise SlurmNotFoundError, SlurmTimeoutError or SlurmCommandError.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.slurm.commands import parse_slurm_timestamp, run_slurm_command

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 1.0
RUNNING_STATE = "RUNNING"
"""Only state in which a job may decide about itself; in others Slurm has decided already."""
_STRIPPED_ENV_PREFIXES = (
    "SLURM_",
    "SBATCH_",
    "SUBMITIT_",
    "AREAL_HPC_",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_",
)
"""Variables of a running job that Slurm's commands would apply to the job that it submits."""
_CONTROLLER_TIME_PATTERN = re.compile(r"Configuration data as of (\S+)")
_SLURM_USER_PATTERN = re.compile(r"^SlurmUser\s*=\s*\S*\((\d+)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class JobFacts:
    state: str
    ends_at: float | None
    """Unix time of the time limit, or of the end of a preemption's grace."""
    excluded_nodes: str
    """Excluded nodes in Slurm's notation; empty if there are none."""
    is_preempted: bool = False
    """Whether a job of higher priority gets its nodes when its grace is over."""
    is_requeueable: bool = True
    """Whether Slurm may start it again under its id; False with sbatch's --no-requeue."""


def parse_job_facts(scontrol_line: str) -> JobFacts:
    """Parse one line of `scontrol show job --oneliner`."""
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
    """Read the Unix time of slurmctld's own clock; None if this Slurm does not print it."""
    output = _run("scontrol", "show", "config")
    match = _CONTROLLER_TIME_PATTERN.match(output)
    return parse_slurm_timestamp(match[1]) if match else None


def read_slurm_user_id() -> int | None:
    output = _run("scontrol", "show", "config")
    match = _SLURM_USER_PATTERN.search(output)
    return int(match[1]) if match else None


def control_job(action: Literal["requeue", "release"], job_id: str) -> None:
    _run("scontrol", action, job_id)


def cancel_job(job_id: str) -> None:
    _run("scancel", job_id)


def update_waiting_job(
    job_id: str, field: Literal["ExcNodeList", "Dependency"], value: str
) -> None:
    _run("scontrol", "update", f"JobId={job_id}", f"{field}={value}")


def read_pending_dependencies() -> dict[str, str]:
    """Read the dependencies of this user's pending jobs by job id, in sbatch's notation."""
    output = _run("squeue", "--me", "--array", "--noheader", "--states=PENDING", "--format=%i %E")
    plain = re.sub(r"\([^)]*\)", "", output)  # squeue adds the state of each condition
    return dict(line.partition(" ")[::2] for line in plain.splitlines())


def read_drain_reasons(nodes: Sequence[str]) -> dict[str, str]:
    """Read, for those of `nodes` that are out of service, the reason by node name."""
    output = _run(
        *("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}"),
        *("--states=drain,down,fail", "--format=%N|%E"),
    )
    return dict(line.strip().partition("|")[::2] for line in output.splitlines())


def retry_command(command: Callable[[], None], times: int = 3) -> None:
    """Try a command some times; log its errors and raise none."""
    for _ in range(times):
        try:
            return command()
        except ClusterError as error:
            log.warning("%s", error)
            time.sleep(RETRY_PAUSE_S)


def strip_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Remove variables that Slurm's commands would take for options of the new job."""
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(_STRIPPED_ENV_PREFIXES)
    }


def _run(*command: str) -> str:
    return run_slurm_command(*command, environ=strip_job_variables(os.environ))


_NODES_PATTERN = re.compile(r"(?<=\s)Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)(?: GRES=(\S*))?")
_GPUS_PATTERN = re.compile(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)")
"""Number of GPUs in `gpu:h100:4(IDX:0-3),shard:2`; the type may be missing."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Share that an allocation has of one node."""

    name: str
    cpus: int
    memory_mib: int
    """0 if the cluster does not allocate memory."""
    gpus: int

    def __str__(self) -> str:
        return f"{self.name} {self.gpus} GPUs, {self.cpus} CPUs"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes of an allocation and its end."""

    job_id: str
    nodes: tuple[NodeShare, ...]
    ends_at: float | None
    """Unix time by slurmctld's clock; None without a time limit."""

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """Read the allocation that this process runs in.

    Raises:
        RecipeError: The process runs in none.
        ClusterError: Slurm does not report it.
    """
    if not environ.get("SLURM_JOB_ID"):
        raise RecipeError(
            "--in-allocation: this shell is in no allocation of Slurm (SLURM_JOB_ID is not set)",
            hint="run the command under salloc, or in a script for sbatch: "
            "salloc --nodes=2 areal-hpc run RECIPE --in-allocation",
        )
    # The id of an array's last member is that of the array, and would stand for all members.
    array, member = (environ.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK"))
    job_id = f"{array}_{member}" if array and member else environ["SLURM_JOB_ID"]
    output = run_slurm_command(
        *("scontrol", "show", "job", "--details", "--oneliner", job_id),
        environ=strip_job_variables(environ),
    )
    return Allocation(job_id, parse_node_shares(output), parse_job_facts(output).ends_at)


def parse_node_shares(scontrol_line: str) -> tuple[NodeShare, ...]:
    """Parse the nodes in a line of `scontrol show job --details --oneliner`, in Slurm's order."""
    return tuple(
        NodeShare(
            name,
            count_numbers_in_ranges(cpu_ids),
            int(memory),
            sum(map(int, _GPUS_PATTERN.findall(gres))),
        )
        for nodes, cpu_ids, memory, gres in _NODES_PATTERN.findall(scontrol_line)
        for name in expand_node_list(nodes)
    )


def count_numbers_in_ranges(ids: str) -> int:
    spans = (span.partition("-") for span in ids.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def expand_node_list(nodelist: str) -> list[str]:
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return [node for part in parts for node in _expand_part(part)]


def _expand_part(hostlist_part: str) -> list[str]:
    before, bracket, rest = hostlist_part.partition("[")
    if not bracket:
        return [hostlist_part]
    spans, _, after = rest.partition("]")
    numbers: list[str] = []
    for span in spans.split(","):
        first, _, last = span.partition("-")
        numbers += [
            f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)
        ]
    return [before + number + end for number in numbers for end in _expand_part(after)]
