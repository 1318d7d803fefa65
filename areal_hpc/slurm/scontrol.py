"""scontrol: facts of jobs, nodes and the allocation that a command runs in; requeue and release.

All that ask Slurm raise SlurmNotFoundError, SlurmTimeoutError or SlurmCommandError of `commands`.
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


def read_drain_reasons(nodes: Sequence[str]) -> dict[str, str]:
    """Why Slurm, or an administrator, took nodes out of service; those of `nodes` that are."""
    shown = _run(
        *("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}"),
        *("--states=drain,down,fail", "--format=%N|%E"),
    )
    return dict(line.strip().partition("|")[::2] for line in shown.splitlines())


def retry_command(command: Callable[[], None], times: int = 3) -> None:
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


_NODES_PATTERN = re.compile(r"(?<=\s)Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)(?: GRES=(\S*))?")
_GPUS_PATTERN = re.compile(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)")
"""In `gpu:h100:4(IDX:0-3),shard:2`; the type may be left out."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What an allocation has of one node."""

    name: str
    cpus: int
    memory_mib: int
    """0 where the cluster does not share memory out."""
    gpus: int

    def __str__(self) -> str:
        return f"{self.name} {self.gpus} GPUs, {self.cpus} CPUs"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes that somebody holds, for as long as they are theirs."""

    job_id: str
    nodes: tuple[NodeShare, ...]
    ends_at: float | None
    """Unix time by slurmctld's clock; None without a time limit."""

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation that this process runs in.

    Raises:
        RecipeError: It runs in none.
        ClusterError: Slurm does not tell of it.
    """
    if not environ.get("SLURM_JOB_ID"):
        raise RecipeError(
            "--in-allocation: this shell is in no allocation of Slurm (SLURM_JOB_ID is not set)",
            hint="run the command under salloc, or in a script for sbatch: "
            "salloc --nodes=2 areal-hpc run RECIPE --in-allocation",
        )
    # The number of an array's last member is that of the array: who names it means all members.
    array, member = (environ.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK"))
    job_id = f"{array}_{member}" if array and member else environ["SLURM_JOB_ID"]
    shown = run_slurm_command(
        *("scontrol", "show", "job", "--details", "--oneliner", job_id),
        environ=strip_job_variables(environ),
    )
    return Allocation(job_id, parse_node_shares(shown), parse_job_facts(shown).ends_at)


def parse_node_shares(scontrol_line: str) -> tuple[NodeShare, ...]:
    """The nodes in one line of `scontrol show job --details --oneliner`, in Slurm's order. Pure."""
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
