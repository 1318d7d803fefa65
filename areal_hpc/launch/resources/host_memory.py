"""Estimate of the host memory of a run's processes, and whether nodes have as much. Pure.

What follows from shapes is counted: a rank's copy of its part of a checkpoint (weights, master
weights and moments, which a process of its own writes while training goes on), what the recipe
offloads, and on a CPU what would lie on the GPU. `BASE_BYTES` is what programs take besides.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.checks.model_files import (
    find_critic_architecture,
    find_frozen_architectures,
    read_recipe_architecture,
)
from areal_hpc.launch.plan import build_job_with_task_per_rank
from areal_hpc.launch.resources.memory import estimate_serving_memory
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.rendezvous import format_cell_name
from areal_hpc.slurm.batch_script.script import compute_resources
from areal_hpc.trainer.model.families.architecture import Architecture
from areal_hpc.trainer.model.memory_estimate import (
    GIB,
    estimate_checkpoint_copy_bytes,
    estimate_stage_memory,
)

MIB = 2**20
BASE_BYTES = {
    "trainer": 900 * MIB,
    "ledger": 100 * MIB,
    "inference": 100 * MIB,
    "server": 1400 * MIB,
    "proxy": 250 * MIB,
    "driver": 400 * MIB,
}
"""Resident memory of each process with a tiny model on a CPU. Larger with CUDA, whose libraries
come on top; not measured there, so no recipe is refused for it."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    job: str
    """`trainer`, or `cell`."""
    process: str
    processes_per_node: int = 1
    """So many of these processes are on one node."""
    fixed_bytes_by_use: dict[str, int] = field(default_factory=dict)
    """Bytes that follow from the recipe's sizes, by what they are for."""
    peak_extra_bytes_by_use: dict[str, int] = field(default_factory=dict)
    """Bytes that are held when a micro-batch, or the KV cache, is as full as the recipe allows."""

    @property
    def bytes_per_process(self) -> int:
        return (
            BASE_BYTES[self.process]
            + sum(self.fixed_bytes_by_use.values())
            + sum(self.peak_extra_bytes_by_use.values())
        )


def estimate_host_memory(
    recipe: Recipe, ranks_per_node: int | None = None
) -> tuple[ProcessMemory, ...]:
    """Host memory of each process of the trainer's job and of a cell, the largest rank's for all.

    The SFT stage has the same ranks, before any of these.
    """
    arch = read_recipe_architecture(recipe.model)
    return (
        _estimate_rank_memory(recipe, arch, ranks_per_node or _count_ranks_per_node(recipe)),
        ProcessMemory("trainer", "ledger"),
        ProcessMemory("cell", "inference"),
        _estimate_server_memory(recipe, arch),
        ProcessMemory("cell", "proxy"),
        ProcessMemory("cell", "driver"),
    )


def get_node_bytes_by_job(recipe: Recipe) -> dict[str, int]:
    """Memory that Slurm gives each node of a job (`trainer`, `cell`), where the recipe says so."""
    slurm = recipe.cluster.slurm
    asked = {
        "trainer": slurm.get_options_of_job("trainer").mem,
        "cell": slurm.get_options_of_job(format_cell_name(0)).mem,
    }
    return {
        job: size for job, mem in asked.items() if (size := parse_slurm_memory_bytes(mem or "0"))
    }


def parse_slurm_memory_bytes(text: str) -> int:
    """Bytes of a size as Slurm takes it, in MiB unless a letter follows; 0 if it is none."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper())
    if found is None:
        return 0
    return int(found[1]) << {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[found[2]]


def find_host_memory_problems(
    recipe: Recipe, node_bytes_by_job: Mapping[str, int], ranks_per_node: int | None = None
) -> list[Problem]:
    """What the recipe's sizes alone put on a node that has less memory, job by job.

    Trainer ranks lie as `cluster.slurm` says, unless it is known how many a node has.
    """
    try:
        processes = estimate_host_memory(recipe, ranks_per_node)
    except RecipeError:  # told by who needs the model
        return []
    problems = []
    for job, own in _group_by_job(processes):
        held = sum(sum(one.fixed_bytes_by_use.values()) * one.processes_per_node for one in own)
        if held <= node_bytes_by_job.get(job, held):
            continue
        if job == "cell":
            hint = "lower inference.replicas_per_cell, or take nodes with more memory"
        elif recipe.trainer.offload.optimizer:
            hint = "set trainer.offload.optimizer=false, or take nodes with more memory"
        else:
            hint = "more ranks in trainer.parallel, fewer of them a node, or nodes with more memory"
        parts = ", ".join(
            f"{name} {size / GIB:.1f} in each of {one.processes_per_node} {one.process} processes"
            for one in own
            for name, size in one.fixed_bytes_by_use.items()
        )
        problems.append(
            Problem(
                f"the {job} job needs {held / GIB:.1f} GiB of host memory a node ({parts}), "
                f"a node has {node_bytes_by_job[job] / GIB:.1f} GiB",
                f"cluster.slurm.jobs.{job}.mem"
                if job in get_node_bytes_by_job(recipe)
                else "trainer",
                hint,
            )
        )
    return problems


def find_allocation_memory_problems(
    recipe: Recipe, environment: Mapping[str, str]
) -> list[Problem]:
    given = parse_slurm_memory_bytes(environment.get("SLURM_MEM_PER_NODE", "0"))
    return find_host_memory_problems(recipe, {"trainer": given, "cell": given}) if given else []


def build_host_memory_report(recipe: Recipe) -> Iterator[str]:
    """Lines: host memory process by process, and a warning for what will not fit a node."""
    try:
        processes = estimate_host_memory(recipe)
    except RecipeError:  # the report of GPU memory says so
        return
    node_bytes = get_node_bytes_by_job(recipe)
    yield ""
    yield "host memory in GiB, estimated"
    for job, own in _group_by_job(processes):
        for one in own:
            parts = ", ".join(
                f"{name} {size / GIB:.2f}"
                for name, size in (one.fixed_bytes_by_use | one.peak_extra_bytes_by_use).items()
            )
            count = f"{one.processes_per_node} x " if one.processes_per_node > 1 else ""
            yield f"  {job:<8} {one.process:<10} {count:>5}{one.bytes_per_process / GIB:8.2f}" + (
                f"  ({parts})" if parts else ""
            )
        total = sum(one.bytes_per_process * one.processes_per_node for one in own)
        of = f" of {node_bytes[job] / GIB:.1f}" if job in node_bytes else ""
        yield f"  {job:<8} {'a node':<10} {'':>5}{total / GIB:8.2f}{of}"
        if total > node_bytes.get(job, total):
            yield f"warning: a node of the {job} job may run out of memory"
    for problem in find_host_memory_problems(recipe, node_bytes):
        yield f"warning: {problem}"


def _group_by_job(
    processes: Sequence[ProcessMemory],
) -> list[tuple[str, list[ProcessMemory]]]:
    return [(job, list(own)) for job, own in itertools.groupby(processes, lambda one: one.job)]


def _estimate_rank_memory(recipe: Recipe, arch: Architecture, ranks_per_node: int) -> ProcessMemory:
    config = recipe.trainer
    frozen = find_frozen_architectures(recipe, arch)
    critic = find_critic_architecture(recipe, arch)
    stages = [
        estimate_stage_memory(arch, config, stage, frozen, critic)
        for stage in range(config.parallel.pp)
    ]
    held = {
        "checkpoint": estimate_checkpoint_copy_bytes(arch, config, critic),
        "optimizer": max(one.host_optimizer for one in stages),
        "frozen networks": max(one.host_frozen for one in stages),
    }
    peak_extra_bytes_by_use = {"activations": max(one.host_activations for one in stages)}
    if config.device == "cpu":
        held["state"] = max(one.parameters + one.gradients + one.optimizer for one in stages)
        peak_extra_bytes_by_use["passes"] = max(one.activations + one.logits for one in stages)
    return ProcessMemory(
        "trainer",
        "trainer",
        ranks_per_node,
        {name: size for name, size in held.items() if size},
        {name: size for name, size in peak_extra_bytes_by_use.items() if size},
    )


def _estimate_server_memory(recipe: Recipe, arch: Architecture) -> ProcessMemory:
    config = recipe.inference
    replicas = config.replicas_per_cell
    if config.device != "cpu":
        return ProcessMemory("cell", "server", replicas)
    # Without a GPU's size the cache is as large as the recipe says, or not known.
    memory = estimate_serving_memory(arch, config, None)
    cache = (memory.total - memory.weights) * config.tp
    held = {"weights": memory.weights * config.tp}
    return ProcessMemory("cell", "server", replicas, held, {"KV cache": cache} if cache else {})


def _count_ranks_per_node(recipe: Recipe) -> int:
    job = build_job_with_task_per_rank("trainer", recipe, [])
    try:
        return compute_resources(
            job, recipe.cluster.slurm.get_options_of_job("trainer")
        ).tasks_per_node
    except RecipeError:  # told by what submits; without Slurm all ranks are here
        return job.tasks
