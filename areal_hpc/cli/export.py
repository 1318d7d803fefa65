"""`areal-hpc export`: export a checkpoint as a Hugging Face model."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup, parse_run_dir


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    export = commands.add_parser(
        "export",
        help="export a checkpoint as a Hugging Face model",
        description="Export the weights of a checkpoint, trained in any parallel layout, as a "
        "Hugging Face model directory with its tokenizer.",
    )
    export.add_argument("run", type=Path, help="a run directory")
    export.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    export.add_argument(
        "--out", type=Path, help="output directory (default: export/step_... in the run directory)"
    )
    export.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> int:
    from areal_hpc.errors import RecipeError
    from areal_hpc.launch.plan import get_initial_policy
    from areal_hpc.recipe.loading import load_recipe

    layout = parse_run_dir(arguments.run)
    recipe = load_recipe(layout.recipe)
    out: Path | None = arguments.out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(
            f"something is already at {out}",
            key="--out",
            hint="choose a directory that does not exist",
        )
    if find_spec("torch") is None:
        return _in_train_environment(recipe.cluster.train.python, arguments)
    from areal_hpc.rundir.paths import format_step_dir
    from areal_hpc.trainer.checkpoints.export import choose_checkpoint, export_checkpoint

    checkpoint = choose_checkpoint(layout.checkpoints_dir, arguments.step)
    target = (out or layout.export(format_step_dir(checkpoint.state.step))).resolve()
    print(f"exporting step {checkpoint.state.step} of {layout.root}", flush=True)
    export_checkpoint(
        checkpoint, get_initial_policy(recipe, layout), target, lambda line: print(line, flush=True)
    )
    print(target)
    return 0


def _in_train_environment(configured: str, arguments: argparse.Namespace) -> int:
    """The same command by the Python of the role `train`, which has torch."""
    from areal_hpc.errors import RecipeError
    from areal_hpc.jobs.environment import get_interpreter

    python = get_interpreter("train", configured)
    if Path(python).absolute() == Path(sys.executable).absolute():
        raise RecipeError(
            f"{python} has no torch, which is needed to read checkpoints",
            key="cluster.train.python",
            hint="make setup, or name the trainer's Python in the recipe",
        )
    command = [python, "-m", "areal_hpc", "export", str(arguments.run)]
    if arguments.step is not None:
        command += ["--step", str(arguments.step)]
    if arguments.out is not None:
        command += ["--out", str(arguments.out)]
    return subprocess.run(command, check=False).returncode
