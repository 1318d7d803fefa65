"""`areal-hpc sync`: a run's metrics for a tracker."""

import argparse
import sys
from collections.abc import Callable

from areal_hpc.cli.arguments import CommandGroup, parse_run_dir
from areal_hpc.errors import RunInterruptedError

FOLLOW_PERIOD_S = 30.0


def add_commands(commands: CommandGroup) -> None:
    sync = commands.add_command(
        "sync",
        _write_metrics_for_tracker,
        ["run"],
        help="write a run's metrics for a tracker (wandb), offline",
        description="Write the metrics of a run that are settled and new for a tracker, without a "
        "network: for wandb an offline run, all with one id. Whatever is killed, no step is "
        "written twice. The run itself knows nothing of it.",
        example="areal-hpc sync runs/quickstart/demo --python ~/wandb/bin/python\n"
        "areal-hpc sync runs/quickstart/demo --follow --project quickstart\n"
        "areal-hpc sync runs/quickstart/demo --tracker my_tracker.py",
    )
    add = sync.add_argument
    add(
        "--tracker",
        default="wandb",
        metavar="wandb|FILE.py",
        help="wandb, or a program: docs/metrics.md",
    )
    help_ = "the Python that has the tracker's package (default: that of this command)"
    add("--python", default=sys.executable, metavar="PATH", help=help_)
    add("--project", default="", metavar="NAME", help="project of the tracker")
    add("--follow", action="store_true", help="go on until the run is finished or cancelled")


def _write_metrics_for_tracker(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.terminal import catch_stop_signals
    from areal_hpc.view.trackers.sync import choose_tracker, write_new_rows_for_tracker

    paths = parse_run_dir(arguments.run)
    tracker = choose_tracker(arguments.tracker, arguments.python, arguments.project)

    def sync() -> bool:
        is_last = paths.finished_marker.exists() or paths.cancelled_marker.exists()
        rows = write_new_rows_for_tracker(paths, tracker)
        if rows or not arguments.follow:
            print(f"{paths.tracker(tracker.name).root}: {rows} new rows", flush=True)
        return is_last

    if not arguments.follow:
        sync()
        return 0
    with catch_stop_signals() as stop:
        return _write_tracker_parts_until_run_ends(sync, stop.wait)


def _write_tracker_parts_until_run_ends(
    sync: Callable[[], bool], wait: Callable[[float], bool]
) -> int:
    while not sync():
        if wait(FOLLOW_PERIOD_S):
            return RunInterruptedError.exit_code
    return 0
