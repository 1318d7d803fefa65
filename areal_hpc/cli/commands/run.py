"""`areal-hpc run`, `plan`, `recipe-keys` and `submit`; the work itself is in launch/run.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import CommandGroup, parse_slurm_job_id
from areal_hpc.cli.commands.plan import describe_plan
from areal_hpc.rundir.paths import RunPaths

if TYPE_CHECKING:
    from areal_hpc.recipe.recipe import Recipe


def add_commands(commands: CommandGroup) -> None:
    run = commands.add_command(
        "run",
        _run_recipe,
        ["recipe", "overrides", "--fresh"],
        help="train a recipe on this machine",
        description="Train a recipe on this machine. Run the same command again to resume.",
        example="areal-hpc run recipes/quickstart.yaml\n"
        "areal-hpc run my_recipe.yaml trainer.total_steps=50 rollout.n_samples=16\n"
        "salloc --nodes=2 areal-hpc run my_recipe.yaml --in-allocation",
    )
    dry_run = "print the jobs, processes, GPUs and memory; start nothing"
    run.add_argument("--dry-run", action="store_true", help=dry_run)
    in_allocation = "run the jobs as steps (srun) of the Slurm allocation that this shell holds"
    run.add_argument("--in-allocation", action="store_true", help=in_allocation)
    help_ = "show the jobs and GPU memory of a recipe; start nothing"
    commands.add_command(
        "plan",
        _print_plan,
        ["recipe", "overrides"],
        help=help_,
        description="Show the jobs of a recipe, their processes, nodes and GPUs, and what the GPUs "
        "hold. Start nothing and write nothing.",
        example="areal-hpc plan recipes/gpu64_math_qwen2.5_7b.yaml cluster.gpu_memory_gib=80",
    )
    commands.add_command(
        "recipe-keys",
        _print_recipe_keys,
        help="print the reference table of all recipe keys",
        description="Print every key of a recipe, its type, default and meaning, as Markdown.",
        example="areal-hpc recipe-keys | grep rollout",
    )
    submit = commands.add_command(
        "submit",
        _submit_recipe,
        ["recipe", "overrides", "--site", "--fresh"],
        help="submit a recipe to Slurm",
        description="Set up the run directory, submit all jobs, and return. Jobs restart by "
        "themselves. Submit again to resume a run whose jobs have ended.",
        example="areal-hpc submit my_recipe.yaml --site site.yaml --dry-run\n"
        "for lr in 1e-6 3e-6; do\n"
        "    areal-hpc submit my_recipe.yaml trainer.optimizer.lr=$lr trial_name=lr-$lr\n"
        "done",
    )
    for option, help_ in (
        ("--dry-run", "print all sbatch scripts and the cost; change nothing"),
        ("--write-only", "set up everything but do not call sbatch"),
        ("--wait", "show progress until the run ends; Ctrl-C detaches"),
    ):
        submit.add_argument(option, action="store_true", help=help_)
    help_ = "start after this job has succeeded (repeatable)"
    submit.add_argument(
        "--after",
        action="append",
        type=parse_slurm_job_id,
        default=[],
        metavar="JOBID",
        help=help_,
    )


def _run_recipe(arguments: argparse.Namespace) -> int:
    # Imported here: `--help` and the shard commands stay quick without pydantic and submitit.
    from areal_hpc.launch.run import run
    from areal_hpc.recipe.loading import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        lines: Iterable[str] = describe_plan(recipe, on_this_machine=not arguments.in_allocation)
        if arguments.in_allocation:
            from areal_hpc.jobs.environment import get_interpreters
            from areal_hpc.launch.held_allocation import describe_planned_steps
            from areal_hpc.slurm.allocation import read_allocation

            allocation, pythons = read_allocation(os.environ), get_interpreters(recipe)
            lines = chain(lines, [""], describe_planned_steps(recipe, allocation, pythons))
        print("\n".join(lines))
        print(f"\nnothing was started; {_describe_run_dir(recipe)}")
        return 0
    result = run(recipe, fresh=arguments.fresh, in_allocation=arguments.in_allocation)
    return result.exit_code


def _describe_run_dir(recipe: Recipe) -> str:
    from areal_hpc.rundir.paths import RunPaths
    from areal_hpc.view.state.run_view import RunView

    paths = RunPaths(recipe.run_dir.resolve())
    if not paths.recipe.exists():
        return f"a run would write to {paths.root}"
    view = RunView(paths)
    at = f"step {view.step} of {view.total_steps}"
    return f"{paths.root} holds a run at {at}, which the command goes on with (--fresh starts over)"


def _print_plan(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe.loading import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    print("\n".join(describe_plan(recipe)))
    return 0


def _print_recipe_keys(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe.reference import render_key_table

    print(render_key_table(), end="")
    return 0


def _submit_recipe(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch import slurm_launcher, slurm_requests
    from areal_hpc.launch.run import report_if_finished, submit
    from areal_hpc.launch.terminal import say
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.view.dry_run import format_dry_run

    recipe = load_recipe(arguments.recipe, arguments.overrides, arguments.site)
    paths = RunPaths(recipe.run_dir.resolve())
    if arguments.dry_run:
        requests = slurm_requests.build_remaining_job_requests(recipe, Path.cwd(), arguments.after)
        print(format_dry_run(paths, requests), end="")
        return 0
    if arguments.write_only:
        if not arguments.fresh and report_if_finished(recipe, paths):
            return 0
        say(f"run      {paths.root}")
        for script in slurm_launcher.prepare_run_and_write_scripts(
            recipe, print_line=say, fresh=arguments.fresh
        ):
            print(f"sbatch   {script}")
        return 0
    result = submit(recipe, wait=arguments.wait, after=arguments.after, fresh=arguments.fresh)
    return result.exit_code
