"""`areal-hpc replay`: train recorded batches again without inference."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_hpc import errors
from areal_hpc.cli.arguments import CommandGroup, parse_run_dir
from areal_hpc.rundir.paths import RunPaths


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    replay = commands.add_parser(
        "replay",
        help="train recorded steps again, without inference",
        description=(
            "Train steps of a run again from its manifests and shards, in a new directory (not a "
            "replay buffer). Without learning overrides, loss and gradient norm are compared "
            "with the "
            "recorded ones."
        ),
    )
    replay.add_argument("run", type=Path, help="run directory (read only)")
    replay.add_argument("--steps", required=True, metavar="FIRST..LAST", help="10..20, or one step")
    replay.add_argument(
        "--out", type=Path, help="directory to make; RUN.replay_FIRST_LAST when absent"
    )
    replay.add_argument(
        "overrides", nargs="*", metavar="key=value", help="trainer.optimizer.lr=2e-6"
    )
    replay.set_defaults(command=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.replay import ReplayRun, parse_steps
    from areal_hpc.launch.run import STOPPING, stop_on_signals
    from areal_hpc.view.live_progress import PlainReporter

    run = parse_run_dir(arguments.run)
    first, last = parse_steps(arguments.steps)
    out = arguments.out or run.root.with_name(f"{run.root.name}.replay_{first}_{last}")
    layout = RunPaths(out.resolve())
    replay = ReplayRun(run, first, last, arguments.overrides, layout)
    reporter = PlainReporter(layout, last, 0)
    reporter.say(f"replay   steps {first} to {last} of {run.root}")
    try:
        with stop_on_signals(STOPPING) as stop:
            replay.carry_out(reporter, stop)
    except errors.RunInterruptedError as interrupted:
        print("stopped; the same command continues the replay")
        return interrupted.exit_code
    print(layout.root)
    return 0
