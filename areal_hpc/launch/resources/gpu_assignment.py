"""GPUs of this machine for the jobs of a stage, each task its own.

Under Slurm this is Slurm's to do.
"""

from collections.abc import Iterator, Mapping
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


def find_gpu_problems(recipe: Recipe, environ: Mapping[str, str]) -> list[Problem]:
    try:
        return find_gpu_shortages(recipe, find_usable_gpus(recipe, environ))
    except RecipeError as error:
        return list(error.problems)


def assign_gpus(stage: JobStage, visible_gpus: VisibleGpus, recipe: Recipe) -> GpuAssignment:
    """GPUs for every task of a stage, none of them twice: its jobs run at the same time.

    A task that computes on the CPU gets none; `auto` means the CPU only where no GPU is visible.

    Raises:
        RecipeError: There are too few.
    """
    needed = sum(job.tasks * job.gpus_per_task for job in stage.jobs)
    # Trainer and inference name the same device: a recipe is refused otherwise.
    is_cpu = recipe.trainer.device == "auto" and not visible_gpus.ids
    if needed > len(visible_gpus.ids) and not is_cpu:
        raise RecipeError.from_problems([_describe_shortage(stage, needed, visible_gpus, recipe)])
    left = iter(visible_gpus.ids)
    return {
        job.name: [list(islice(left, job.gpus_per_task)) for _ in range(job.tasks)]
        for job in stage.jobs
    }


def find_gpu_shortages(recipe: Recipe, visible_gpus: VisibleGpus) -> list[Problem]:
    problems: list[Problem] = []
    for stage in plan_run(recipe, RunPaths(recipe.run_dir)):
        try:
            assign_gpus(stage, visible_gpus, recipe)
        except RecipeError as error:
            problems += error.problems
    return problems


def format_assignment(assignment: GpuAssignment) -> Iterator[str]:
    for job, tasks in assignment.items():
        if any(tasks):
            yield f"{job}: {' | '.join(','.join(ids) for ids in tasks)}"


def _describe_shortage(
    stage: JobStage, needed: int, visible_gpus: VisibleGpus, recipe: Recipe
) -> Problem:
    keys, needs, inference = ["trainer.parallel"], [], recipe.inference
    for job in stage.jobs:
        shape = f"{job.tasks} ranks x 1"
        if job.is_task_a_node:
            shape = f"{inference.replicas_per_cell} replicas x tp {inference.tp}"
        needs.append(f"{job.name} {shape} = {job.tasks * job.gpus_per_task}")
    if stage.others:
        keys += ["inference.cells", "inference.replicas_per_cell", "inference.tp"]
    if stage.others and recipe.evaluation.separate_cell:
        keys.append("evaluation.separate_cell")
    shown, least = len(visible_gpus.ids), len({job.is_task_a_node for job in stage.jobs})
    lower = "lower trainer.parallel.dp" + (" or these keys of inference" if stage.others else "")
    cannot = (
        f"at least {least} are needed: trainer ranks and SGLang share none; use trainer.device=cpu "
        "inference.device=cpu, or nodes with GPUs by areal-hpc submit"
    )
    return Problem(
        f"too few GPUs for the stage {stage.name}: it needs {needed} at once "
        f"({', '.join(needs)}), "
        f"this machine shows {shown} ({visible_gpus.source})",
        ", ".join(keys),
        f"{lower}, or use several nodes with areal-hpc submit" if shown >= least else cannot,
    )
