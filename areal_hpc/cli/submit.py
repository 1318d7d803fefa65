"""`areal-hpc submit`: a run or a sweep as Slurm jobs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import CommandGroup
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths

if TYPE_CHECKING:
    from areal_hpc.recipe.recipe import Recipe


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    submit = commands.add_parser(
        "submit",
        help="submit a recipe to Slurm",
        description=(
            "Set up the run directory, submit all jobs, and return. Jobs restart by themselves. "
            "Submit again to resume a run whose jobs have ended."
        ),
    )
    submit.add_argument("recipe", type=Path)
    submit.add_argument("overrides", nargs="*", metavar="key=value", help="trainer.total_steps=10")
    submit.add_argument(
        "--site",
        type=Path,
        metavar="FILE",
        help="site file: defaults for `cluster.*`; the recipe takes precedence",
    )
    submit.add_argument(
        "--dry-run",
        action="store_true",
        help="print all sbatch scripts and the cost; change nothing",
    )
    submit.add_argument(
        "--no-submit",
        action="store_true",
        help="set up everything but do not call sbatch",
    )
    submit.add_argument(
        "--wait", action="store_true", help="show progress until the run ends; Ctrl-C detaches"
    )
    submit.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="JOBID",
        help="start after this job has succeeded (repeatable)",
    )
    submit.add_argument(
        "--sweep",
        metavar="KEY=V1,V2,...",
        help="sweep: one run per value, as job arrays, each with its own trial_name",
    )
    submit.add_argument(
        "--fresh", action="store_true", help="move an existing run directory away and start over"
    )
    submit.set_defaults(command=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch import slurm_launcher
    from areal_hpc.launch.run import is_already_finished, say, submit
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.view.dry_run import format_requests

    if arguments.sweep:
        return _submit_sweep(arguments)
    recipe = load_recipe(arguments.recipe, arguments.overrides, arguments.site)
    layout = RunPaths(recipe.run_dir.resolve())
    if arguments.dry_run:
        requests = slurm_launcher.build_requests(recipe, Path.cwd(), arguments.after)
        print(format_requests(layout, requests), end="")
        return 0
    if arguments.no_submit:
        if not arguments.fresh and is_already_finished(recipe, layout):
            return 0
        say(f"run      {layout.root}")
        scripts = slurm_launcher.write_scripts(
            recipe, command_line=sys.argv, say=say, fresh=arguments.fresh
        )
        print("\n".join(f"sbatch   {script}" for script in scripts))
        return 0
    result = submit(recipe, wait=arguments.wait, after=arguments.after, fresh=arguments.fresh)
    return result.exit_code


def _submit_sweep(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.run import get_program_name, say
    from areal_hpc.launch.sweep import build_array_requests, read_sweep, submit_sweep
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.view.dry_run import format_requests

    for option in ("wait", "no_submit"):
        if getattr(arguments, option):
            shown = option.replace("_", "-")
            raise RecipeError(
                f"--{shown} works for a single run, not with --sweep", hint="leave one out"
            )

    def read(further: Sequence[str]) -> Recipe:
        return load_recipe(arguments.recipe, [*arguments.overrides, *further], arguments.site)

    sweep = read_sweep(read, arguments.sweep)
    if arguments.dry_run:
        requests = build_array_requests(sweep, Path.cwd(), arguments.after)
        print(format_requests(sweep.layout, requests, len(sweep.runs)), end="")
        return 0
    for run in sweep.runs:
        print(f"run      {run.run_dir.resolve()}", flush=True)
    submit_sweep(
        sweep, command_line=sys.argv, say=say, after=arguments.after, fresh=arguments.fresh
    )
    first = sweep.runs[0].run_dir.resolve()
    print(f"next     squeue --me\n         {get_program_name()} status {first}")
    return 0
