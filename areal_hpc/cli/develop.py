"""`areal-hpc devcluster` and `bench`: a local Slurm cluster, and the benchmarks of a checkout."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from areal_hpc.checkout import find_checkout
from areal_hpc.cli.arguments import CommandTable, argument
from areal_hpc.errors import RecipeError

BENCHMARKS_DIR = Path(__file__).resolve().parents[2] / "benchmarks"

commands = CommandTable()


@commands.add(
    "devcluster", argument("action", "an action with its options", nargs=argparse.REMAINDER)
)
def _run_devcluster(arguments: argparse.Namespace) -> int:
    """Run a local multi-node Slurm for development and tests.

    A real Slurm of several nodes on this machine, from the distribution's packages (`make
    slurm`). Actions: up, down, env, kill-node, restore-node, status; each has --help.

    $ areal-hpc devcluster up --nodes 4 --gpus-per-node 8
    """
    checkout = find_checkout()
    if checkout is None:
        raise RecipeError(
            "devcluster is in the repository, and not in a wheel",
            hint="start this by the Python of a checkout",
        )
    search_path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "slurm.devcluster", *arguments.action],
        env={**os.environ, "PYTHONPATH": search_path},
    ).returncode


@commands.add(
    "bench",
    argument("name", "shards, trainer, ...", nargs="?"),
    argument("arguments", "for the benchmark itself; try --help", nargs=argparse.REMAINDER),
)
def _run_benchmark(arguments: argparse.Namespace) -> int:
    """Compare a component with its peer or its physical limit.

    The last line of stdout is one JSON object. Without a name, list the benchmarks.

    $ areal-hpc bench shards
    """
    from areal_hpc.jobs.config import get_interpreter

    names = sorted(path.stem for path in BENCHMARKS_DIR.glob("[a-z]*.py"))
    if not names:
        raise RecipeError(
            "the benchmarks are in the repository, and not in a wheel",
            key=str(BENCHMARKS_DIR),
            hint="start this by the Python of a checkout",
        )
    if arguments.name is None:
        print("\n".join(names))
        return 0
    if arguments.name not in names:
        raise RecipeError(
            f"there is no benchmark {arguments.name!r}, only: {', '.join(names)}",
            key=str(BENCHMARKS_DIR),
            hint="`areal-hpc bench` without arguments lists the benchmarks",
        )
    python = get_interpreter("train", "auto")
    return subprocess.run(
        [python, "-m", f"benchmarks.{arguments.name}", *arguments.arguments],
        cwd=BENCHMARKS_DIR.parent,
        # More threads than cores would spin on one another.
        env={"OMP_NUM_THREADS": "1", **os.environ},
    ).returncode
