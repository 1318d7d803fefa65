"""`areal-hpc report` and `areal-hpc trace`: files about runs, to pass on and to open elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup, parse_run_dir


def add_commands(commands: CommandGroup) -> None:
    report = commands.add_command(
        "report",
        _write_report,
        help="write one HTML file on a run, or on several beside one another",
        description="Write a report that needs no network: what the recipe changes, curves, "
        "efficiency, restarts, audit, held-out rewards task by task, good, bad and typical "
        "episodes, provenance. Values of the recipe that may be secrets are left out; "
        "conversations are in it.",
        example="areal-hpc report runs/quickstart/demo\n"
        "areal-hpc report runs/sweep/a runs/sweep/b --out sweep.html",
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="run", help="run directories")
    help_ = "a new file; default: the first run's name with -report.html, here"
    report.add_argument("--out", type=Path, metavar="FILE", help=help_)
    trace = commands.add_command(
        "trace",
        _write_trace,
        ["run"],
        help="write the timeline of some steps for Perfetto",
        description="Write a trace in Chrome's JSON format, which ui.perfetto.dev and "
        "chrome://tracing open: phases of the trainer, model calls of each replica, episodes, "
        "events; from recorded times.",
        example="areal-hpc trace runs/quickstart/demo --steps 10..12",
    )
    help_ = "such as 10..12, or 10"
    trace.add_argument("--steps", type=_parse_steps, required=True, metavar="A..B", help=help_)
    help_ = "a new file; default: the run's name with -trace.json, here"
    trace.add_argument("--out", type=Path, metavar="FILE", help=help_)


def _parse_steps(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if first.isdecimal() and (last.isdecimal() if dots else True):
        steps = int(first), int(last if dots else first)
        if steps[0] <= steps[1]:
            return steps
    raise argparse.ArgumentTypeError(f"expected steps such as 10..12, got {text!r}")


def _write_report(arguments: argparse.Namespace) -> int:
    from areal_hpc.view.report.content import write_report

    runs = [parse_run_dir(path) for path in arguments.runs]
    out = arguments.out or Path(f"{runs[0].run_name.replace('/', '-')}-report.html")
    write_report(list(dict.fromkeys(runs)), out)
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB")
    return 0


def _write_trace(arguments: argparse.Namespace) -> int:
    from areal_hpc.view.timing.trace import write_trace

    run = parse_run_dir(arguments.run)
    out = arguments.out or Path(f"{run.run_name.replace('/', '-')}-trace.json")
    first, last = arguments.steps
    written = write_trace(run, first, last, out)
    print(
        f"{out}: {written.steps} steps, {written.episodes} episodes, {written.calls} model calls; "
        "open it with https://ui.perfetto.dev or chrome://tracing"
    )
    for problem in written.problems:
        print(f"not read: {problem}")
    return 0
