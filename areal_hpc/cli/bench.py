"""`areal-hpc bench`: run a benchmark of the checkout in its environment."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROLE_BY_BENCHMARK = {"shards": "agents", "proxy": "agents"}
"""Benchmarks that need another environment than the trainer's."""


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    bench = commands.add_parser(
        "bench",
        help="compare a component with its peer or its physical limit",
        description="Run a benchmark of this checkout; the last line of stdout is one JSON "
        "object. Without a name, list the benchmarks.",
    )
    bench.add_argument("name", nargs="?", help="shards, trainer, ...")
    bench.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="for the benchmark itself; try --help"
    )
    bench.set_defaults(command=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from areal_hpc.errors import RecipeError
    from areal_hpc.jobs.environment import get_interpreter

    names = sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))
    if arguments.name is None:
        print("\n".join(names))
        return 0
    if arguments.name not in names:
        raise RecipeError(
            f"there is no benchmark {arguments.name!r}, only: {', '.join(names) or 'none'}",
            key=str(BENCHMARKS),
            hint="`areal-hpc bench` without arguments lists the benchmarks; an installed wheel "
            "has none",
        )
    python = get_interpreter(ROLE_BY_BENCHMARK.get(arguments.name, "train"), "auto")
    return subprocess.run(
        [python, "-m", f"benchmarks.{arguments.name}", *arguments.arguments],
        cwd=BENCHMARKS.parent,
        # More threads than cores would spin on one another.
        env={"OMP_NUM_THREADS": "1", **os.environ},
    ).returncode
