"""`areal-hpc status | why | logs | cancel | resume | list`: a run as a whole."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from areal_hpc.cli.arguments import Commands, existing_run, program
from areal_hpc.cli.run import summary
from areal_hpc.errors import RecipeError

UNWELL_EXIT_CODE = 1
LINES = 40
"""What `logs` shows when it is not told how much."""
STOP_MARGIN_S = 10.0
"""On top of a job's own grace: it hears of the stop, and Slurm of its end, some seconds later."""
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""ANSI foreground colours that are readable on dark and on light."""


def add_commands(commands: Commands) -> None:
    """Add this family to the command line."""
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("run", type=Path, help="a run directory")

    status = commands.add_parser(
        "status",
        parents=[place],
        help="how far a run is, and every job of it",
        description="How far a run is, and what Slurm says of every job of it. Asks Slurm once; "
        "`watch -n 30 areal-hpc status RUN` is a polite way to ask again.",
    )
    status.set_defaults(command=_status)

    why = commands.add_parser(
        "why",
        parents=[place],
        help="why a run failed, or what it waits for",
        description="The chain of what led to the last failure: Slurm's states, exit codes and "
        "signals, memory, nodes, and the first traceback across all ranks. Exits with 1 if "
        "somebody has to do something.",
    )
    why.set_defaults(command=_why)

    logs = commands.add_parser(
        "logs", parents=[place], help="the newest lines of all processes, in the order of time"
    )
    logs.add_argument(
        "names", nargs="*", help="jobs (cell-0), processes (proxy), or both (cell-0/proxy)"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on as lines come")
    logs.add_argument("-n", "--lines", type=int, default=LINES, help="default %(default)s")
    logs.add_argument("--attempt", type=int, help="an earlier launch of the run")
    logs.set_defaults(command=_logs)

    cancel = commands.add_parser(
        "cancel",
        parents=[place],
        help="end every job of a run, and leave none",
        description="Tell every job of a run to commit and end, give it the recipe's "
        "cluster.stop_grace_s, then have Slurm end what is left. Jobs that wait or are held go at "
        "once, and none is requeued.",
    )
    cancel.add_argument("--now", action="store_true", help="without the grace: no last commit")
    cancel.set_defaults(command=_cancel)

    resume = commands.add_parser(
        "resume",
        parents=[place],
        help="submit a run again, from its own recipe and its last commit",
        description="Submit again what is left of a run that was cancelled, failed or stopped, "
        "with the recipe in its directory and the overrides given here, from the folder that it "
        "was first submitted from.",
    )
    resume.add_argument("overrides", nargs="*", metavar="key=value", help="inference.cells=4")
    resume.set_defaults(command=_resume)

    listing = commands.add_parser(
        "list",
        help="runs side by side, with what their recipes differ in",
        description="The runs of a file root or of an experiment side by side.",
    )
    listing.add_argument(
        "place", type=Path, nargs="?", default=Path("runs"), help="default %(default)s"
    )
    listing.set_defaults(command=_list)


def _status(arguments: argparse.Namespace) -> int:
    from areal_hpc.cluster.queue import Queue
    from areal_hpc.view.advance import describe_advance, read_advance
    from areal_hpc.view.jobs import describe_jobs, read_jobs, state_of_run

    layout = existing_run(arguments.run)
    run, advance = read_jobs(layout, Queue()), read_advance(layout)
    lines = [f"{layout.root.parent.name}/{layout.root.name}: {state_of_run(run)}"]
    lines += describe_advance(advance)
    if not run.is_local:
        lines += ["", *describe_jobs(run)]
    if advance.step > 0 and (run.is_local or layout.finished_marker.exists()):
        lines += ["", summary(layout)]
    print("\n".join(lines))
    return 0


def _why(arguments: argparse.Namespace) -> int:
    from areal_hpc.cluster.queue import Queue
    from areal_hpc.view.causes import describe_diagnosis, diagnose
    from areal_hpc.view.evidence import gather

    diagnosis = diagnose(gather(existing_run(arguments.run), Queue()))
    print("\n".join(describe_diagnosis(diagnosis, str(arguments.run))))
    return 0 if diagnosis.is_well else UNWELL_EXIT_CODE


def _logs(arguments: argparse.Namespace) -> int:
    from areal_hpc.view.logs import Follower, LogFile, choose_attempt, last_lines, log_files

    layout = existing_run(arguments.run)
    if arguments.follow and arguments.attempt:
        raise RecipeError("an earlier attempt has ended", key="--follow", hint="leave out -f")

    def show(lines: list[tuple[LogFile, str]]) -> None:
        for file, line in lines:
            print(_coloured(file.source, line), flush=arguments.follow)

    follower = Follower(layout, arguments.names) if arguments.follow else None
    if follower is None or follower.files:
        attempt = choose_attempt(layout, arguments.attempt)
        files = log_files(layout, attempt, arguments.names)
        if not files and follower is None:
            known = sorted({file.job for file in log_files(layout, attempt)})
            raise RecipeError(
                f"attempt {attempt} has no log of {' '.join(arguments.names) or 'any process'}",
                hint=f"choose from {', '.join(known)}" if known else "the jobs have not started",
            )
        show(last_lines(files, arguments.lines))
    try:
        while follower is not None:
            show(follower.look())
            follower.wait()
    except KeyboardInterrupt:
        return 0  # the way out of --follow
    return 0


def _coloured(source: str, line: str) -> str:
    if not sys.stdout.isatty():
        return f"{source} | {line}"
    colour = COLOURS[sum(source.encode()) % len(COLOURS)]
    return f"\x1b[{colour}m{source}\x1b[0m | {line}"


def _cancel(arguments: argparse.Namespace) -> int:
    from areal_hpc.cluster.cancelling import cancel_jobs
    from areal_hpc.view.advance import read_advance
    from areal_hpc.view.jobs import ids_of, label_of, refuse_local

    layout = existing_run(arguments.run)
    refuse_local(ids_of(layout), program())
    grace_s = 0.0
    if not arguments.now:
        grace_s = read_advance(layout).recipe["cluster"]["stop_grace_s"] + STOP_MARGIN_S
    layout.cancelled_marker.touch()  # before any signal: a job that is told to stop looks for it
    ended = cancel_jobs(
        lambda: ids_of(layout),
        label=label_of(layout),
        grace_s=grace_s,
        say=partial(print, flush=True),
    )
    print(f"cancelled; {ended} jobs ended, none is left" if ended else "no job was left to cancel")
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch import dispatch
    from areal_hpc.launch.ready import is_finished
    from areal_hpc.recipe import load
    from areal_hpc.rundir.jobs import read_submissions
    from areal_hpc.view.jobs import ids_of, refuse_local, submitted_from

    layout = existing_run(arguments.run)
    refuse_local(ids_of(layout), program())
    folder = submitted_from(read_submissions(layout.submissions)[-1])
    if folder is not None:
        os.chdir(folder)  # agents are imported from there, and paths in the recipe begin there
    recipe = load(layout.recipe, arguments.overrides)
    if recipe.run_dir.resolve() != layout.root:
        raise RecipeError(
            f"with these keys the run would lie in {recipe.run_dir.resolve()}",
            key="cluster.fileroot, experiment_name, trial_name",
            hint="areal-hpc submit starts a run of another name",
        )
    if is_finished(recipe, layout):
        print("this run is finished; more steps: trainer.total_steps=...")
        return 0
    dispatch.submit(recipe, command_line=sys.argv, say=partial(print, flush=True))
    print(f"next     {program()} status {layout.root}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from areal_hpc.cluster.queue import Queue
    from areal_hpc.rundir.paths import find_runs
    from areal_hpc.view.comparison import compare

    layouts = find_runs(arguments.place)
    if not layouts:
        raise RecipeError(
            f"there is no run in {arguments.place}",
            hint="give a file root, an experiment's directory or a run's",
        )
    print("\n".join(compare(layouts, Queue())))
    return 0
