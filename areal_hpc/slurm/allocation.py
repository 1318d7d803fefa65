"""Allocation of nodes that a command runs in, as Slurm tells of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from areal_hpc.errors import RecipeError
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.commands import run_slurm_command

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
        environ=scontrol.strip_job_variables(environ),
    )
    return Allocation(job_id, parse_node_shares(shown), scontrol.parse_job_facts(shown).ends_at)


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
