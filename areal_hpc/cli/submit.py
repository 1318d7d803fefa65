"""`areal-hpc submit`: a run as Slurm jobs."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import Commands, program
from areal_hpc.cli.run import (
    FRESH,
    INTERRUPTED_EXIT_CODE,
    draw_learning_curve,
    is_answered,
    progress,
    summary,
)
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths

if TYPE_CHECKING:
    from areal_hpc.recipe import Recipe


def add_commands(commands: Commands) -> None:
    """Add this family to the command line."""
    submit = commands.add_parser(
        "submit",
        help="hand a recipe's jobs to Slurm",
        description="Put the run directory in place, submit every job of the recipe at once, and "
        "return. Jobs find one another, start again by themselves and end by themselves. Submit "
        "again to continue a run whose jobs have ended.",
    )
    submit.add_argument("recipe", type=Path)
    submit.add_argument("overrides", nargs="*", metavar="key=value", help="trainer.total_steps=10")
    submit.add_argument(
        "--site", type=Path, metavar="FILE", help="keys of `cluster`; the recipe's own win"
    )
    submit.add_argument(
        "--dry-run", action="store_true", help="print every script and the cost; touch nothing"
    )
    submit.add_argument(
        "--write-only",
        action="store_true",
        help="put everything in place and submit nothing, for sbatch by hand",
    )
    submit.add_argument(
        "--wait", action="store_true", help="show progress until the run ends; Ctrl-C detaches"
    )
    submit.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="JOBID",
        help="start only when this job has succeeded; may be given several times",
    )
    submit.add_argument(
        "--array",
        metavar="KEY=V1,V2,...",
        help="a run for each value, as job arrays; each has a directory and a trial of its own",
    )
    submit.add_argument(
        "--fresh", action="store_true", help="move an existing run directory aside and start anew"
    )
    submit.set_defaults(command=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch import dispatch
    from areal_hpc.recipe import load
    from areal_hpc.view.scripts import describe_requests

    if arguments.array:
        return _submit_sweep(arguments)
    recipe = load(arguments.recipe, arguments.overrides, arguments.site)
    layout = RunPaths(recipe.run_dir.resolve())
    if arguments.dry_run:
        requests = dispatch.requests_of(recipe, Path.cwd(), arguments.after)
        print(describe_requests(layout, requests), end="")
        return 0
    if arguments.write_only:
        if not arguments.fresh and is_answered(recipe, layout):
            return 0
        _say(f"run      {layout.root}")
        scripts = dispatch.write_down(
            recipe, command_line=sys.argv, say=_say, fresh=arguments.fresh
        )
        print("\n".join(f"sbatch   {script}" for script in scripts))
        return 0
    return submit_run(recipe, wait=arguments.wait, after=arguments.after, fresh=arguments.fresh)


def submit_run(
    recipe: Recipe,
    *,
    wait: bool,
    after: Sequence[str] = (),
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    notes: Sequence[str] = (),
    anew: str = FRESH,
) -> int:
    """Submit what is left of a run, and show how it goes if asked to wait.

    Args:
        recipe: What to run.
        wait: Until the run ends; Ctrl-C detaches.
        after: Slurm's numbers of jobs that must have succeeded before this run starts.
        fresh: Move an earlier run aside first.
        sys_path: Folders from which the user's code is imported, beside the present one.
        notes: What to tell first.
        anew: How a finished run can be started anew.

    Returns:
        The exit code.
    """
    from areal_hpc.launch import dispatch

    layout = RunPaths(recipe.run_dir.resolve())
    if not fresh and is_answered(recipe, layout, anew):
        return 0
    for note in (*notes, f"run      {layout.root}"):
        _say(note)
    dispatch.submit(
        recipe, command_line=sys.argv, say=_say, after=after, fresh=fresh, sys_path=sys_path
    )
    if wait:
        return _wait(recipe, layout)
    print(f"next     {program()} status {layout.root}\n         squeue --me")
    return 0


def _submit_sweep(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.sweep import array_requests, read_sweep, submit_sweep
    from areal_hpc.recipe import load
    from areal_hpc.view.scripts import describe_requests

    for option in ("wait", "write_only"):
        if getattr(arguments, option):
            shown = option.replace("_", "-")
            raise RecipeError(
                f"--{shown} is for one run, --array for several", hint="leave one out"
            )

    def read(further: Sequence[str]) -> Recipe:
        return load(arguments.recipe, [*arguments.overrides, *further], arguments.site)

    sweep = read_sweep(read, arguments.array)
    if arguments.dry_run:
        requests = array_requests(sweep, Path.cwd(), arguments.after)
        print(describe_requests(sweep.layout, requests, len(sweep.runs)), end="")
        return 0
    for run in sweep.runs:
        print(f"run      {run.run_dir.resolve()}", flush=True)
    submit_sweep(
        sweep, command_line=sys.argv, say=_say, after=arguments.after, fresh=arguments.fresh
    )
    print(f"next     squeue --me\n         {program()} status {sweep.runs[0].run_dir.resolve()}")
    return 0


def _say(message: str) -> None:
    print(message, flush=True)


def _wait(recipe: Recipe, layout: RunPaths) -> int:
    from areal_hpc.launch import dispatch, here

    stop = threading.Event()

    def detach(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, detach)
    signal.signal(signal.SIGTERM, detach)
    try:
        with progress(recipe, layout) as reporter:
            dispatch.watch(recipe, layout, reporter, stop)
    except here.Interrupted:
        print(f"detached; the jobs go on: {program()} status {layout.root}")
        return INTERRUPTED_EXIT_CODE
    draw_learning_curve(layout)
    print(summary(layout))
    return 0
