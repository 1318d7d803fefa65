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
        help="cancel all jobs of a run",
        description="Signal all jobs to save a checkpoint and exit, wait for "
        "cluster.stop_grace_s, then scancel what is left. Pending and held jobs are cancelled at "
        "once; nothing is requeued.",
    )
    cancel.add_argument("run", type=Path, help="a run directory")
    cancel.add_argument(
        "--now", action="store_true", help="cancel without a grace period; no final checkpoint"
    )
    cancel.set_defaults(command=_cancel)

    resume = commands.add_parser(
        "resume",
        help="resubmit a run from its last checkpoint",
        description="Submit a cancelled, failed or stopped run again from its own recipe plus "
        "the overrides given here, in the directory it was first submitted from.",
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
    print(f"cancelled {ended} jobs; none are left" if ended else "there were no jobs to cancel")
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
            f"with these overrides the run directory would be {recipe.run_dir.resolve()}",
            key="cluster.fileroot, experiment_name, trial_name",
            hint="use `areal-hpc submit` to start a run under another name",
        )
    if is_finished(recipe, layout):
        print("this run is finished; for more steps set trainer.total_steps=...")
        return 0
    slurm_launcher.submit(recipe, command_line=sys.argv, say=say)
    print(f"next     {get_program_name()} status {layout.root}")
    return 0
