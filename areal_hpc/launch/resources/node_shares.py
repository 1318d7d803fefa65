"""Processors and memory that jobs with GPUs ask of their nodes where the site says nothing. Pure.

Slurm gives a task one CPU unless asked for more, and a job as much memory as its site's
default for those: on one core nine processes of a cell and its kernels' launches crawl, and the
trainer's first checkpoint is killed. What follows from the plan is counted here; the constants are
assumptions, generous, for nobody knows what agents take.
"""

from collections.abc import Sequence

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.checks.model_files import (
    find_critic_architecture,
    find_frozen_architectures,
    read_recipe_architecture,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import JobKind, JobOptions, SlurmConfig, get_job_kind
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.slurm.batch_script.script import MEMORY_FLAGS, compute_resources
from areal_hpc.trainer.model.memory_estimate import (
    GIB,
    estimate_checkpoint_copy_bytes,
    estimate_trainer_memory,
)

CPUS_PER_RANK = 4
"""A trainer rank's Python, autograd's thread, NCCL's, and the writer of its checkpoint."""
CPUS_PER_SERVER_GPU = 4
"""A scheduler that spins, tokenizer and detokenizer of a replica, and what compiles kernels."""
CPUS_PER_CELL_NODE = 4
"""Proxy, control proxy, driver, and one for the agents."""
HOST_BYTES_PER_GPU_PROCESS = 8 * GIB
"""A process with CUDA's libraries, pinned buffers and its part of the weights as they load."""
HOST_BYTES_FOR_CPU_PROCESSES = 8 * GIB
"""Everything on a node that uses no GPU: ledger, or proxy, driver and agents."""
_CPU_FLAGS = {"cpus-per-task", "cpus-per-gpu", "cores-per-socket"}


def add_cpu_and_memory_options(recipe: Recipe, jobs: Sequence[JobSpec]) -> SlurmConfig:
    """The recipe's options for Slurm, with `cpus-per-task` and `mem` of every job with GPUs.

    Jobs that get whole nodes get them with all that is in them.

    Raises:
        RecipeError: The memory of a job cannot be known, or jobs do not fit the nodes.
    """
    slurm = recipe.cluster.slurm
    problems: list[Problem] = []
    completed: dict[JobKind, JobOptions] = {}
    for job in jobs:
        kind = get_job_kind(job.name)
        if kind in completed or not job.gpus_per_task:
            continue
        options = slurm.get_options_of_job(job.name)
        try:
            derived = _derive_cpu_and_memory_options(recipe, job, kind, options)
        except RecipeError as error:
            problems += [one for one in error.problems if one not in problems]
            continue
        if derived:
            own = slurm.jobs.get(kind, JobOptions())
            completed[kind] = own.model_copy(update={"sbatch": {**own.sbatch, **derived}})
    if problems:
        raise RecipeError.from_problems(problems)
    return slurm.model_copy(update={"jobs": {**slurm.jobs, **completed}})


def _derive_cpu_and_memory_options(
    recipe: Recipe, job: JobSpec, kind: JobKind, options: JobOptions
) -> dict[str, int | str]:
    flags = options.sbatch.keys()
    if "exclusive" in flags:
        return {}
    derived: dict[str, int | str] = {}
    if not flags & _CPU_FLAGS:
        derived["cpus-per-task"] = (
            job.gpus_per_task * CPUS_PER_SERVER_GPU + CPUS_PER_CELL_NODE
            if job.is_task_a_node
            else CPUS_PER_RANK
        )
    if not flags & MEMORY_FLAGS:
        tasks_per_node = compute_resources(job, options).tasks_per_node
        size = (
            tasks_per_node * job.gpus_per_task * HOST_BYTES_PER_GPU_PROCESS
            + HOST_BYTES_FOR_CPU_PROCESSES
        )
        if not job.is_task_a_node:
            size += _estimate_trainer_host_bytes_per_node(recipe, tasks_per_node, kind)
        derived["mem"] = f"{-(-size // GIB)}G"
    return derived


def _estimate_trainer_host_bytes_per_node(recipe: Recipe, tasks_per_node: int, kind: str) -> int:
    try:
        arch = read_recipe_architecture(recipe.model)
    except RecipeError as error:
        raise RecipeError(
            f"the memory that the {kind} job needs on a node is not known: "
            f"{error.problems[0].message}",
            key=f"cluster.slurm.jobs.{kind}.sbatch.mem",
            hint=f"{error.problems[0].hint}; or set it (as in 200G)",
        ) from error
    frozen = find_frozen_architectures(recipe, arch)
    critic = find_critic_architecture(recipe, arch)
    memory = estimate_trainer_memory(arch, recipe.trainer, frozen=frozen, critic=critic)
    offloaded = memory.host_activations + memory.host_optimizer + memory.host_frozen
    return tasks_per_node * (
        estimate_checkpoint_copy_bytes(arch, recipe.trainer, critic) + offloaded
    )
