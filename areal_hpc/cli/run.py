"""`areal-hpc run | plan | keys`: a run from its recipe to its summary."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import Commands, program, stop_on_signals
from areal_hpc.rundir.paths import RunPaths

if TYPE_CHECKING:
    from areal_hpc.launch.plan import Stage
    from areal_hpc.recipe import Recipe
    from areal_hpc.view.progress import LiveReporter, PlainReporter

INTERRUPTED_EXIT_CODE = 130
FRESH = "--fresh starts it anew"


def add_commands(commands: Commands) -> None:
    """Add this family to the command line."""
    run = commands.add_parser(
        "run",
        help="train a recipe in the foreground",
        description="Train a recipe in the foreground. Run it again to continue where it stopped.",
    )
    run.add_argument("recipe", type=Path)
    run.add_argument("overrides", nargs="*", metavar="key=value", help="trainer.total_steps=10")
    run.add_argument(
        "--fresh", action="store_true", help="move an existing run directory aside and start anew"
    )
    run.set_defaults(command=_run)

    plan = commands.add_parser("plan", help="print the jobs of a recipe without starting them")
    plan.add_argument("recipe", type=Path)
    plan.add_argument("overrides", nargs="*", metavar="key=value")
    plan.set_defaults(command=_plan)

    keys = commands.add_parser("keys", help="every key of a recipe, as a Markdown table")
    keys.set_defaults(command=_keys)


def _run(arguments: argparse.Namespace) -> int:
    # Imported here: `--help` and the shard commands stay quick without pydantic and submitit.
    from areal_hpc.recipe import load

    return train(load(arguments.recipe, arguments.overrides), fresh=arguments.fresh)


def train(
    recipe: Recipe,
    *,
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    notes: Sequence[str] = (),
    anew: str = FRESH,
) -> int:
    """Run a recipe in the foreground and show how it goes.

    Args:
        recipe: What to run.
        fresh: Move an earlier run aside first.
        sys_path: Folders from which the user's code is imported, beside the present one.
        notes: What to tell first.
        anew: How a finished run can be started anew.

    Returns:
        The exit code.
    """
    from areal_hpc.launch import here

    layout = RunPaths(recipe.run_dir.resolve())
    if not fresh and is_answered(recipe, layout, anew):
        return 0
    stop = threading.Event()
    stop_on_signals(stop)
    try:
        with progress(recipe, layout) as reporter:
            for note in (*notes, f"run      {layout.root}"):
                reporter.say(note)
            here.run(
                recipe,
                command_line=sys.argv,
                reporter=reporter,
                stop=stop,
                fresh=fresh,
                sys_path=sys_path,
            )
    except here.Interrupted:
        draw_learning_curve(layout)
        print("stopped; the same command continues the run")
        return INTERRUPTED_EXIT_CODE
    draw_learning_curve(layout)
    print(summary(layout))
    return 0


def is_answered(recipe: Recipe, layout: RunPaths, anew: str = FRESH) -> bool:
    """True, and the run's summary is told, if it has nothing left to do."""
    from areal_hpc.launch.ready import is_finished

    if not is_finished(recipe, layout):
        return False
    if not layout.learning_curve.exists():  # a run under Slurm that nobody waited for
        draw_learning_curve(layout)
    print(summary(layout))
    print(f"\nthis run is finished; {anew}")
    return True


@contextmanager
def progress(recipe: Recipe, layout: RunPaths) -> Iterator[PlainReporter | LiveReporter]:
    """Show how a run goes until the context ends."""
    from areal_hpc.view.progress import LiveReporter, PlainReporter

    reporter_class = LiveReporter if sys.stdout.isatty() else PlainReporter
    warmup_steps = recipe.warmup.total_steps if recipe.warmup else 0
    reporter = reporter_class(layout, recipe.trainer.total_steps, warmup_steps)
    try:
        yield reporter
    finally:
        reporter.close()


def summary(layout: RunPaths) -> str:
    """What a run amounts to so far. Writes nothing."""
    from areal_hpc.view.snapshot import read_snapshot
    from areal_hpc.view.summary import summarise

    return summarise(layout, read_snapshot(layout), program())


def draw_learning_curve(layout: RunPaths) -> None:
    """Draw the run's learning curve into its directory, if matplotlib is installed.

    Only commands that train call this: those that look at a run may have no right to write there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return  # a training script may run in an environment of its own
    from areal_hpc.view.curve import draw_curve
    from areal_hpc.view.snapshot import read_snapshot

    snapshot = read_snapshot(layout)
    if snapshot.steps:
        draw_curve(
            snapshot, f"{layout.root.parent.name} / {layout.root.name}", layout.learning_curve
        )


def _plan(arguments: argparse.Namespace) -> int:
    from areal_hpc.cli.memory_table import memory_table
    from areal_hpc.launch.plan import Facts, plan
    from areal_hpc.recipe import load

    recipe = load(arguments.recipe, arguments.overrides)
    layout = RunPaths(recipe.run_dir)
    for stage in plan(recipe, layout, Facts.before_setup(recipe)).stages:
        print(f"stage {stage.name}: complete when {stage.done_marker} exists")
        for job in stage.jobs:
            print(f"  job {job.name}: {job.tasks} task{'s' if job.tasks > 1 else ''}")
            for process in job.processes:
                where = {"all": "every task", "first": "first task"}.get(process.tasks, "others")
                print(f"    {process.name:<10} {process.role:<7} {where:<11} {process.entry}")
        for line in _gpus_here(stage, recipe):
            print(f"  {line}")
    print("\n".join(["", *memory_table(recipe)]))
    return 0


def _gpus_here(stage: Stage, recipe: Recipe) -> Iterator[str]:
    """Lines: how `areal-hpc run` would share this machine's GPUs out, if it shows any."""
    from areal_hpc.cluster.gpus import visible_gpus
    from areal_hpc.errors import RecipeError
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
    from areal_hpc.recipe_keys import describe_keys

    print(describe_keys(), end="")
    return 0
