"""What `areal-hpc plan` prints of a recipe."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from areal_hpc.errors import RecipeError

if TYPE_CHECKING:
    from areal_hpc.launch.plan import JobStage
    from areal_hpc.recipe.recipe import Recipe
    from areal_hpc.rundir.jobs import JobSpec

_LINE_CHARS = 100


def describe_plan(recipe: Recipe, *, on_this_machine: bool = True) -> Iterator[str]:
    """Lines: each stage's jobs, processes and devices, then their environment and memory.

    And, unless the jobs run elsewhere, who gets which of this machine's GPUs.
    """
    # Imported here: `--help` stays quick without pydantic and submitit.
    from areal_hpc.launch.plan import plan_run
    from areal_hpc.launch.resources.memory import build_memory_report
    from areal_hpc.recipe.presets import describe_preset
    from areal_hpc.rundir.paths import RunPaths

    for stage in plan_run(recipe, RunPaths(recipe.run_dir)):
        total = sum(job.tasks * job.gpus_per_task for job in stage.jobs)
        needs = f"{_format_count(total, 'GPU')} at once" if total else "no GPU"
        yield f"stage {stage.name}: {needs}; done when {stage.done_marker} exists"
        for described, alike in itertools.groupby(stage.jobs, _describe_job_without_name):
            jobs = list(alike)
            names = [job.name for job in jobs]
            title = f"job {names[0]}" if len(names) == 1 else f"jobs {names[0]} to {names[-1]}"
            yield f"  {title}: {described[0]}{_describe_cpus_and_memory(recipe, jobs[0])}"
            yield from (f"    {line}" for line in described[1:])
        if on_this_machine:
            yield from (f"  {line}" for line in _describe_local_gpu_assignment(stage, recipe))
    if preset := list(describe_preset(recipe.model_dump(mode="json"))):
        yield from ["", *preset]
    yield from ["", *_describe_environment_variables(recipe), ""]
    yield from build_memory_report(recipe)


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_job_without_name(job: JobSpec) -> list[str]:
    count = _format_count(job.tasks, "node" if job.is_task_a_node else "task")
    gpus = f"{_format_count(job.gpus_per_task, 'GPU')} each" if job.gpus_per_task else "on the CPU"
    lines = [f"{count}, {gpus}"]
    for process in job.processes:
        where = {"all": "every task", "first": "first task"}.get(process.tasks, "others")
        gpus = "uses the GPUs" if process.uses_gpus and job.gpus_per_task else ""
        line = f"{process.name:<10} {process.role:<7} {where:<11} {process.entry:<32} {gpus}"
        lines.append(line.rstrip())
    return lines


def _describe_cpus_and_memory(recipe: Recipe, job: JobSpec) -> str:
    from areal_hpc.launch.resources.node_shares import add_cpu_and_memory_options

    if not job.gpus_per_task:
        return ""
    try:
        options = add_cpu_and_memory_options(recipe, [job]).get_options_of_job(job.name)
    except RecipeError as error:
        return f"; under Slurm not known without {error.problems[0].key}"
    shares = []
    if cpus := options.sbatch.get("cpus-per-task"):
        shares.append(f"{_format_count(int(cpus), 'CPU')} a task")
    if memory := options.sbatch.get("mem"):
        shares.append(f"{memory} of memory a node")
    return f"; under Slurm {', '.join(shares)}" if shares else ""


def _describe_local_gpu_assignment(stage: JobStage, recipe: Recipe) -> Iterator[str]:
    from areal_hpc.launch.resources.gpu_assignment import (
        assign_gpus,
        find_usable_gpus,
        format_assignment,
    )

    try:
        visible = find_usable_gpus(recipe, os.environ)
        if not visible.ids:
            return
        for line in format_assignment(assign_gpus(stage, visible, recipe)):
            yield f"GPUs with areal-hpc run on this machine: {line}"
    except RecipeError as error:
        yield f"areal-hpc run refuses on this machine: {error.problems[0].message}"


def _describe_environment_variables(recipe: Recipe) -> Iterator[str]:
    """Lines: variables that processes of each role get beside those of their job.

    Of the recipe's own only the names, as values may be secrets.
    """
    from areal_hpc.jobs.environment import build_role_variables

    yield "environment by role (SGLang has that of agents, whose process starts it, and of serve)"
    for role, variables in build_role_variables(recipe).items():
        shown = [f"{name}={value}" for name, value in variables.items()]
        own = getattr(recipe.cluster, role).variables
        shown += [f"{name}=(cluster.{role}.variables)" for name in own]
        yield from _wrap_under_title(f"  {role:<7} ", shown or ["nothing"])
    if network := recipe.cluster.slurm.network.build_environment_variables():
        shown = [f"{name}={value}" for name, value in network.items()]
        yield from _wrap_under_title("  all, under Slurm: ", shown)


def _wrap_under_title(title: str, words: Sequence[str]) -> list[str]:
    return textwrap.wrap(
        " ".join(words),
        _LINE_CHARS,
        initial_indent=title,
        subsequent_indent=" " * len(title),
        break_long_words=False,
        break_on_hyphens=False,
    )
