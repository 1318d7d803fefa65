"""`areal-hpc prefetch`: what a run needs from the network, fetched before it starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_hpc.cli.arguments import Commands


def add_commands(commands: Commands) -> None:
    """Add this family to the command line."""
    prefetch = commands.add_parser(
        "prefetch",
        help="fetch a recipe's models and data sets from the Hugging Face hub",
        description="Put the models and data sets of a recipe into the Hugging Face cache, and "
        "write their revisions and digests into the run directory. For a login node: runs never "
        "download. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are honoured.",
    )
    prefetch.add_argument("recipe", type=Path)
    prefetch.add_argument("overrides", nargs="*", metavar="key=value")
    prefetch.set_defaults(command=_prefetch)


def _prefetch(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.prefetch import prefetch
    from areal_hpc.recipe import load
    from areal_hpc.rundir.paths import RunPaths

    recipe = load(arguments.recipe, arguments.overrides)
    layout = RunPaths(recipe.run_dir)
    prefetch(recipe, layout, lambda line: print(line, flush=True))
    print(f"all in place; recorded in {layout.prefetched}")
    return 0
