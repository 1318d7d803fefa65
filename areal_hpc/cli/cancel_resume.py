"""`areal-hpc cancel` and `resume`: end the jobs of a run, and submit them again."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup, parse_run_dir
from areal_hpc.errors import RecipeError

STOP_MARGIN_S = 10.0
"""On top of a job's own grace: it hears of the stop, and Slurm of its end, some seconds later."""


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    cancel = commands.add_parser(
        "cancel",
        help="end every job of a run, and leave none",
        description="Tell every job of a run to write a checkpoint and end, give it the recipe's "
        "cluster.stop_grace_s, then have Slurm end what is left. Jobs that wait or are held go at "
        "once, and none is requeued.",
    )
    cancel.add_argument("run", type=Path, help="a run directory")
    cancel.add_argument("--now", action="store_true", help="without the grace: no last checkpoint")
    cancel.set_defaults(command=_cancel)

    resume = commands.add_parser(
        "resume",
        help="submit a run again, from its own recipe and its last checkpoint",
        description="Submit again what is left of a run that was cancelled, failed or stopped, "
        "with the recipe in its directory and the overrides given here, from the folder that it "
        "was first submitted from.",
    )
    resume.add_argument("run", type=Path, help="a run directory")
    resume.add_argument("overrides", nargs="*", metavar="key=value", help="inference.cells=4")
    resume.set_defaults(command=_resume)


def _cancel(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.run import get_program_name, say
    from areal_hpc.slurm.cancel import cancel_jobs
    from areal_hpc.view.jobs import get_job_label, list_job_ids, require_slurm_run
    from areal_hpc.view.progress_summary import read_run_progress

    layout = parse_run_dir(arguments.run)
    require_slurm_run(list_job_ids(layout), get_program_name())
    grace_s = 0.0
    if not arguments.now:
        grace_s = read_run_progress(layout).recipe["cluster"]["stop_grace_s"] + STOP_MARGIN_S
    layout.cancelled_marker.touch()  # before any signal: a job that is told to stop looks for it
    ended = cancel_jobs(
        lambda: list_job_ids(layout),
        label=get_job_label(layout),
        grace_s=grace_s,
        say=say,
    )
    print(f"cancelled; {ended} jobs ended, none is left" if ended else "no job was left to cancel")
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch import slurm_launcher
    from areal_hpc.launch.prepared_run import is_finished
    from areal_hpc.launch.run import get_program_name, say
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.rundir.jobs import read_submissions
    from areal_hpc.view.jobs import find_submit_dir, list_job_ids, require_slurm_run

    layout = parse_run_dir(arguments.run)
    require_slurm_run(list_job_ids(layout), get_program_name())
    folder = find_submit_dir(read_submissions(layout.submissions)[-1])
    if folder is not None:
        os.chdir(folder)  # agents are imported from there, and paths in the recipe begin there
    recipe = load_recipe(layout.recipe, arguments.overrides)
    if recipe.run_dir.resolve() != layout.root:
        raise RecipeError(
            f"with these keys the run would lie in {recipe.run_dir.resolve()}",
            key="cluster.fileroot, experiment_name, trial_name",
            hint="areal-hpc submit starts a run of another name",
        )
    if is_finished(recipe, layout):
        print("this run is finished; more steps: trainer.total_steps=...")
        return 0
    slurm_launcher.submit(recipe, command_line=sys.argv, say=say)
    print(f"next     {get_program_name()} status {layout.root}")
    return 0
