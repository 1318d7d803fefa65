"""`areal-hpc submit`: a run as Slurm jobs."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import Commands, program
from areal_hpc.cli.run import INTERRUPTED_EXIT_CODE, summary
from areal_hpc.layout import RunLayout

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
        "--fresh", action="store_true", help="move an existing run directory aside and start anew"
    )
    submit.set_defaults(command=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    from areal_hpc import dispatch
    from areal_hpc.ready import is_finished
    from areal_hpc.recipe import load
    from areal_hpc.view.scripts import describe_requests

    recipe = load(arguments.recipe, arguments.overrides, arguments.site)
    layout = RunLayout(recipe.run_dir.resolve())
    if arguments.dry_run:
        requests = dispatch.requests_of(recipe, Path.cwd(), arguments.after)
        print(describe_requests(layout, requests), end="")
        return 0
    if is_finished(recipe, layout) and not arguments.fresh:
        print(summary(layout))
        print("\nthis run is finished; --fresh starts it anew")
        return 0
    print(f"run      {layout.root}", flush=True)
    dispatch.submit(
        recipe,
        command_line=sys.argv,
        say=_say,
        after=arguments.after,
        fresh=arguments.fresh,
    )
    if arguments.wait:
        return _wait(recipe, layout)
    print(f"next     {program()} status {layout.root}\n         squeue --me")
    return 0


def _say(message: str) -> None:
    print(message, flush=True)


def _wait(recipe: Recipe, layout: RunLayout) -> int:
    from areal_hpc import dispatch, launch
    from areal_hpc.view.progress import LiveReporter, PlainReporter

    stop = threading.Event()

    def detach(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, detach)
    signal.signal(signal.SIGTERM, detach)
    reporter_class = LiveReporter if sys.stdout.isatty() else PlainReporter
    warmup_steps = recipe.warmup.total_steps if recipe.warmup else 0
    reporter = reporter_class(layout, recipe.trainer.total_steps, warmup_steps)
    try:
        dispatch.watch(recipe, layout, reporter, stop)
    except launch.Interrupted:
        reporter.close()
        print(f"detached; the jobs go on: {program()} status {layout.root}")
        return INTERRUPTED_EXIT_CODE
    finally:
        reporter.close()
    print(summary(layout))
    return 0
