"""`areal-hpc run`, `plan` and `keys`; the work itself is in launch/run.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import CommandGroup
from areal_hpc.rundir.paths import RunPaths

if TYPE_CHECKING:
    from areal_hpc.launch.plan import JobStage
    from areal_hpc.recipe.recipe import Recipe


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    run = commands.add_parser(
        "run",
        help="train a recipe on this machine",
        description="Train a recipe on this machine. Run the same command again to resume.",
    )
    run.add_argument("recipe", type=Path)
    run.add_argument("overrides", nargs="*", metavar="key=value", help="trainer.total_steps=10")
    run.add_argument(
        "--fresh", action="store_true", help="move an existing run directory away and start over"
    )
    run.set_defaults(command=_run)

    plan = commands.add_parser(
        "plan", help="show the jobs and GPU memory of a recipe; start nothing"
    )
    plan.add_argument("recipe", type=Path)
    plan.add_argument("overrides", nargs="*", metavar="key=value")
    plan.set_defaults(command=_plan)

    keys = commands.add_parser("recipe-keys", help="print the reference table of all recipe keys")
    keys.set_defaults(command=_keys)


def _run(arguments: argparse.Namespace) -> int:
    # Imported here: `--help` and the shard commands stay quick without pydantic and submitit.
    from areal_hpc.launch.run import run
    from areal_hpc.recipe.loading import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    return run(recipe, fresh=arguments.fresh).exit_code


def _plan(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.memory_report import render_memory_table
    from areal_hpc.launch.plan import LaunchFacts, plan_run
    from areal_hpc.recipe.loading import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    layout = RunPaths(recipe.run_dir)
    for stage in plan_run(recipe, layout, LaunchFacts.before_setup(recipe)).stages:
        print(f"stage {stage.name}: done when {stage.done_marker} exists")
        for job in stage.jobs:
            print(f"  job {job.name}: {job.tasks} task{'s' if job.tasks > 1 else ''}")
            for process in job.processes:
                where = {"all": "every task", "first": "first task"}.get(process.tasks, "others")
                print(f"    {process.name:<10} {process.role:<7} {where:<11} {process.entry}")
        for line in _gpus_here(stage, recipe):
            print(f"  {line}")
    print("\n".join(["", *render_memory_table(recipe)]))
    return 0


def _gpus_here(stage: JobStage, recipe: Recipe) -> Iterator[str]:
    """Lines: how `areal-hpc run` would share this machine's GPUs out, if it shows any."""
    from areal_hpc.errors import RecipeError
    from areal_hpc.jobs.gpus import visible_gpus
    from areal_hpc.launch.devices import assign, describe

    visible = visible_gpus(os.environ)
    if not visible.ids:
        return
    try:
        for line in describe(assign(stage, visible, recipe)):
            yield f"GPUs with areal-hpc run on this machine: {line}"
    except RecipeError as error:
        yield f"areal-hpc run refuses on this machine: {error.problems[0].message}"


def _keys(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe.reference import render_key_table

    print(render_key_table(), end="")
    return 0
