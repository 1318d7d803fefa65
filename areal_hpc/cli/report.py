"""`areal-hpc report`: one file about runs, to pass on."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup, parse_run_dir


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    report = commands.add(
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


def _write_report(arguments: argparse.Namespace) -> int:
    from areal_hpc.view.report.writing import write_report

    runs = [parse_run_dir(path) for path in arguments.runs]
    out = arguments.out or Path(f"{runs[0].run_name.replace('/', '-')}-report.html")
    write_report(list(dict.fromkeys(runs)), out)
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB")
    return 0
