"""`areal-hpc shards`: list, show and verify recorded trajectories."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup, parse_run_dir
from areal_hpc.rundir.paths import RunPaths


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    shards = commands.add_parser("shards", help="inspect recorded trajectories")
    verbs = shards.add_subparsers(required=True, metavar="VERB")
    listing = verbs.add_parser("ls", help="one line per sealed shard")
    listing.add_argument("run", type=Path, help="a run directory")
    listing.add_argument("--json", action="store_true", help="one JSON object per shard")
    listing.set_defaults(command=_shards_ls)
    show = verbs.add_parser("show", help="one trajectory, token by token")
    show.add_argument("run", type=Path, help="a run directory, or one shard file")
    which = show.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "row", type=int, nargs="?", help="row, counted over the run's shards (or in the file)"
    )
    which.add_argument("--ticket", type=int, help="every row of this ticket")
    show.set_defaults(command=_shards_show)
    verify = verbs.add_parser("verify", help="verify all digests; list damaged files")
    verify.add_argument("run", type=Path, help="a run directory")
    verify.set_defaults(command=_shards_verify)


def _shards_ls(arguments: argparse.Namespace) -> int:
    from areal_hpc.view.shard_report import format_shards_json, list_shards

    write = format_shards_json if arguments.json else list_shards
    print(write(parse_run_dir(arguments.run), _version_text))
    return 0


def _shards_show(arguments: argparse.Namespace) -> int:
    from areal_hpc.view.shard_report import find_ticket_rows, show_trajectory

    path = arguments.run.resolve()
    run_dir = path.parent.parent if path.is_file() else path
    rows = [arguments.row] if arguments.ticket is None else find_ticket_rows(path, arguments.ticket)
    tokenizer = _tokenizer_of(RunPaths(run_dir))
    print("\n\n".join(show_trajectory(path, row, tokenizer, _version_text) for row in rows))
    return 0


def _shards_verify(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from areal_hpc.errors import ShardError
    from areal_hpc.shards.verify import verify_run
    from areal_hpc.view.shard_report import format_verification

    layout = parse_run_dir(arguments.run)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verifying", total=None)
        report = verify_run(
            layout, lambda done, total: progress.update(task, completed=done, total=total)
        )
    print(format_verification(report))
    return ShardError.exit_code if report.problems else 0


def _version_text(packed: int) -> str:
    from areal_hpc.wire.weight_version import WeightVersion

    return str(WeightVersion.unpack(packed))


def _tokenizer_of(layout: RunPaths) -> Path | None:
    """The tokenizer file of the model that a run trains, if it can be found."""
    from areal_hpc.recipe.loading import load_recipe

    folders = [layout.sft_export, layout.tiny_model_dir]
    if layout.recipe.exists():
        named = load_recipe(layout.recipe).model.path
        folders += [named] if named else []
    files = (folder / "tokenizer.json" for folder in folders)
    return next((file for file in files if file.is_file()), None)
