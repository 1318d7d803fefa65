"""GPUs of this machine for the jobs of a stage, each task its own.

Under Slurm this is Slurm's to do.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.jobs.node.gpus import (
    VisibleGpus,
    find_visible_gpus,
    read_numa_node_by_gpu,
    select_wanted_gpus_or_raise,
)
from areal_hpc.launch.plan import JobStage, plan_run
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import RunPaths

GpuAssignment = Mapping[str, list[list[str]]]
"""By the name of a job: the GPUs of each of its tasks, in the order of their ranks."""


def find_usable_gpus(recipe: Recipe, environ: Mapping[str, str]) -> VisibleGpus:
    return select_wanted_gpus_or_raise(
        find_visible_gpus(environ), recipe.cluster.gpus, read_numa_node_by_gpu()
    )


def find_gpu_problems(
    recipe: Recipe, environ: Mapping[str, str], stages: Sequence[JobStage] | None = None
) -> list[Problem]:
    """Why the GPUs that are visible do not do for the stages of a run, or for others."""
    if stages is None:
        stages = plan_run(recipe, RunPaths(recipe.run_dir))
    problems: list[Problem] = []
    try:
        visible_gpus = find_usable_gpus(recipe, environ)
    except RecipeError as error:
        return list(error.problems)
    for stage in stages:
        try:
            assign_gpus(stage, visible_gpus, recipe)
        except RecipeError as error:
            problems += error.problems
    return problems


def assign_gpus(stage: JobStage, visible_gpus: VisibleGpus, recipe: Recipe) -> GpuAssignment:
    """GPUs for every task of a stage, none of them twice: its jobs run at the same time.

    A task that computes on the CPU gets none; `auto` means the CPU only where no GPU is visible.

    Raises:
        RecipeError: There are too few.
    """
    needed = sum(job.tasks * job.gpus_per_task for job in stage.jobs)
    is_cpu = recipe.trainer.device == "auto" and not visible_gpus.ids
    if needed > len(visible_gpus.ids) and not is_cpu:
        raise RecipeError.from_problems([_describe_shortage(stage, needed, visible_gpus, recipe)])
    left = iter(visible_gpus.ids)
    return {
        job.name: [list(islice(left, job.gpus_per_task)) for _ in range(job.tasks)]
        for job in stage.jobs
    }


def format_assignment(assignment: GpuAssignment) -> Iterator[str]:
    for job, tasks in assignment.items():
        if any(tasks):
            yield f"{job}: {' | '.join(','.join(ids) for ids in tasks)}"


def _describe_shortage(
    stage: JobStage, needed: int, visible_gpus: VisibleGpus, recipe: Recipe
) -> Problem:
    keys, lower, needs, inference = [], [], [], recipe.inference
    kinds = {job.is_task_a_node for job in stage.jobs}
    for job in stage.jobs:
        shape = f"{job.tasks} ranks x 1"
        if job.is_task_a_node:
            shape = f"{inference.replicas_per_cell} replicas x tp {inference.tp}"
        needs.append(f"{job.name} {shape} = {job.tasks * job.gpus_per_task}")
    if False in kinds:
        keys.append("trainer.parallel")
        lower.append("trainer.parallel.dp")
    if True in kinds:
        keys += ["inference.cells", "inference.replicas_per_cell", "inference.tp"]
        lower.append("these keys of inference")
    if stage.others and recipe.evaluation.separate_cell:
        keys.append("evaluation.separate_cell")
    shown = len(visible_gpus.ids)
    hint = f"lower {' or '.join(lower)}, or use several nodes with areal-hpc submit"
    if shown < len(kinds):
        hint = (
            f"at least {len(kinds)} are needed: trainer ranks and SGLang share none; use "
            "trainer.device=cpu, or nodes with GPUs by areal-hpc submit"
        )
    return Problem(
        f"too few GPUs for the stage {stage.name}: it needs {needed} at once "
        f"({', '.join(needs)}), "
        f"this machine shows {shown} ({visible_gpus.source})",
        ", ".join(keys),
        hint,
    )
