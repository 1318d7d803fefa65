"""`areal-hpc make-tiny-model` and `prefetch`: make or download models and data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    tiny = commands.add_parser(
        "make-tiny-model",
        help="make a tiny random Qwen3 with its own tokenizer",
        description="Make a tiny, randomly initialised Qwen3 in Hugging Face format. Its "
        "byte-level BPE tokenizer is trained on the text you give.",
    )
    tiny.add_argument("--out", type=Path, required=True, help="directory to make")
    tiny.add_argument(
        "--texts",
        type=Path,
        help="text file, one sample a line; the quick-start's demonstrations when absent",
    )
    tiny.add_argument("--seed", type=int, default=1)
    tiny.set_defaults(command=_make_tiny_model)

    prefetch = commands.add_parser(
        "prefetch",
        help="download the models and data sets of a recipe",
        description="Put the models and data sets of a recipe into the Hugging Face cache, and "
        "write their revisions and digests into the run directory. For a login node: runs never "
        "download. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are honoured.",
    )
    prefetch.add_argument("recipe", type=Path)
    prefetch.add_argument("overrides", nargs="*", metavar="key=value")
    prefetch.set_defaults(command=_prefetch)


def _make_tiny_model(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.tiny_model import make_tiny_model

    make_tiny_model(arguments.out, _texts(arguments.texts), seed=arguments.seed)
    print(f"made a tiny Qwen3 in {arguments.out}")
    return 0


def _texts(path: Path | None) -> list[str]:
    """The lines of a file, or the quick start's demonstrations."""
    from areal_hpc.errors import RecipeError

    if path is not None:
        if not path.is_file():
            raise RecipeError(f"there is no text file at {path}", key="--texts")
        return path.read_text().splitlines()
    try:
        from areal_hpc.dataset.sources import iterate_rows
        from areal_hpc.recipe.sections.dataset import TaskSetConfig

        sys.path.insert(0, str(Path.cwd()))
        source = TaskSetConfig(
            generator="examples.quickstart.task:demonstrations", kwargs={"size": 2000, "seed": 1}
        )
        return [
            message["content"]
            for row in iterate_rows(source, "--texts")
            for message in row["messages"]
        ]
    except RecipeError as error:
        raise RecipeError(
            "the quick start's demonstrations are found only in a checkout",
            key="--texts",
            hint="start this in the checkout, or give --texts FILE",
        ) from error


def _prefetch(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.prefetch import prefetch
    from areal_hpc.launch.run import say
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.rundir.paths import RunPaths

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    layout = RunPaths(recipe.run_dir)
    prefetch(recipe, layout, say)
    print(f"everything is in the cache; recorded in {layout.prefetched}")
    return 0
