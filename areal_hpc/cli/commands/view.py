"""`areal-hpc view`: the pages of runs in a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup
from areal_hpc.errors import RecipeError


def add_commands(commands: CommandGroup) -> None:
    view = commands.add_command(
        "view",
        _serve_or_bundle_dashboard,
        help="show runs in a browser: curves, conversations, tokens",
        description="Serve pages about the runs of a file root, from their files alone, to a "
        "browser on this machine or through the ssh tunnel that is printed. The address holds a "
        "secret. With --bundle, write the pages of one run into a folder and end.",
        example="areal-hpc view runs\nareal-hpc view runs/quickstart/demo --bundle demo-pages",
    )
    place = "a file root, an experiment's directory or a run's; default %(default)s"
    view.add_argument("place", type=Path, nargs="?", default=Path("runs"), help=place)
    view.add_argument("--port", type=int, help="default: a free one, the same the next time")
    bundle = "a new folder for pages that need no server"
    view.add_argument("--bundle", type=Path, metavar="DIR", help=bundle)


def _serve_or_bundle_dashboard(arguments: argparse.Namespace) -> int:
    from areal_hpc.rundir.paths import list_runs
    from areal_hpc.view.dashboard.bundle import write_bundle
    from areal_hpc.view.dashboard.server import serve_dashboard
    from areal_hpc.view.transcripts.row_index import get_cache_dir

    runs = list_runs(arguments.place)
    if not arguments.bundle:
        if not arguments.place.is_dir():
            raise RecipeError(
                f"there is no directory {arguments.place}", hint="give a file root or a run"
            )
        serve_dashboard(
            arguments.place.resolve(), arguments.port, lambda line: print(line, flush=True)
        )
        return 0
    if len(runs) != 1:
        raise RecipeError(
            f"--bundle takes one run, {arguments.place} has {len(runs)}",
            hint="give a run's directory",
        )
    count = write_bundle(runs[0], arguments.bundle, get_cache_dir())
    print(f"{arguments.bundle / 'index.html'}: {count} conversations")
    return 0
