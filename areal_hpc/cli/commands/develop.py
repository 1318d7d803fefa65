"""`areal-hpc devcluster` and `bench`: a local Slurm cluster, and the benchmarks of a checkout."""

import argparse
import os
import shlex
import subprocess
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

from areal_hpc.cli.arguments import UNHEALTHY_EXIT_CODE, CommandGroup
from areal_hpc.errors import RecipeError
from areal_hpc.slurm.devcluster.paths import DevclusterPaths, get_default_root
from areal_hpc.slurm.versions import PROVEN_RELEASES

BENCHMARKS_DIR = Path(__file__).resolve().parents[3] / "benchmarks"


def add_commands(commands: CommandGroup) -> None:
    _add_devcluster_commands(commands)
    bench = commands.add_command(
        "bench",
        _run_benchmark,
        help="compare a component with its peer or its physical limit",
        description="Run a benchmark of this checkout; the last line of stdout is one JSON "
        "object. Without a name, list the benchmarks.",
        example="areal-hpc bench shards",
    )
    bench.add_argument("name", nargs="?", help="shards, trainer, ...")
    bench.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="for the benchmark itself; try --help"
    )


def _add_devcluster_commands(commands: CommandGroup) -> None:
    actions = commands.add_subcommand_group(
        "devcluster",
        help="run a local multi-node Slurm for development and tests",
        description="A real Slurm of several nodes on this machine, from the distribution's "
        "packages (`make slurm` of a checkout). As root every node has a network, a host name "
        "and processes of its own; otherwise nodes share the loopback address.",
    )
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument(
        "--state-dir",
        type=Path,
        default=_get_default_devcluster_dir(),
        metavar="DIR",
        help="state directory (default: %(default)s)",
    )
    patience = argparse.ArgumentParser(add_help=False)
    patience.add_argument(
        "--timeout-s", type=float, default=60.0, metavar="S", help="timeout in seconds (60)"
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("node", help="such as n01")
    help_ = "start the cluster, or what is missing of it"
    up = actions.add_command(
        "up",
        _start_devcluster,
        parents=[place, patience],
        help=help_,
        example="areal-hpc devcluster up --nodes 4 --gpus-per-node 8",
    )
    help_ = "stop the cluster and remove all of its files"
    actions.add_command(
        "down",
        _stop_and_remove_devcluster,
        parents=[place],
        help=help_,
        example="areal-hpc devcluster down",
    )
    help_ = 'print the environment for Slurm clients: eval "$(areal-hpc devcluster env)"'
    actions.add_command(
        "env",
        _print_slurm_conf_export,
        parents=[place],
        help=help_,
        example='eval "$(areal-hpc devcluster env)"',
    )
    help_ = "disconnect a node and kill its processes"
    kill = actions.add_command(
        "kill-node",
        _kill_devcluster_node,
        parents=[place, named],
        help=help_,
        example="areal-hpc devcluster kill-node n02",
    )
    help_ = "kill slurmd only; jobs keep running, unseen by Slurm"
    kill.add_argument("--only-slurmd", action="store_true", help=help_)
    parents = [place, named, patience]
    actions.add_command(
        "restore-node",
        _power_cycle_devcluster_node,
        parents=parents,
        help="start a node anew",
        example="areal-hpc devcluster restore-node n02",
    )
    help_ = "show the health of every daemon and node"
    actions.add_command(
        "status",
        _print_devcluster_health,
        parents=[place],
        help=help_,
        example="areal-hpc devcluster status",
    )
    # Absent when not given: a cluster that is up keeps the values it was started with.
    add = partial(up.add_argument, default=argparse.SUPPRESS)
    add("--nodes", type=int, metavar="N", help="4 when not given")
    add("--gpus-per-node", type=int, metavar="N", help="fake GPUs per node (8)")
    add("--cpus-per-node", type=int, metavar="N", help="CPUs that each node reports (16)")
    add("--grace-s", type=int, metavar="S", help="preemption grace period in seconds (15)")
    slurm = "release of Slurm (the machine's own); others are unpacked by `make slurm-roots`"
    add("--slurm", choices=PROVEN_RELEASES, help=slurm)
    no_accounting = "without slurmdbd and sacct"
    add("--no-accounting", dest="accounting", action="store_false", help=no_accounting)
    add("--loopback", dest="namespaces", action="store_false", help="no namespaces, even as root")


def _start_devcluster(arguments: argparse.Namespace) -> int:
    from areal_hpc.slurm.devcluster.cluster import start_cluster
    from areal_hpc.slurm.devcluster.plan import DevclusterSettings

    settings = {field.name for field in fields(DevclusterSettings)}
    asked = {name: value for name, value in vars(arguments).items() if name in settings}
    start_cluster(
        _get_devcluster_paths(arguments), asked, arguments.timeout_s, partial(print, flush=True)
    )
    given = arguments.state_dir
    option = (
        "" if given == _get_default_devcluster_dir() else f" --state-dir {shlex.quote(str(given))}"
    )
    print(f"""to use it: eval "$(areal-hpc devcluster env{option})\"""")
    return 0


def _stop_and_remove_devcluster(arguments: argparse.Namespace) -> int:
    from areal_hpc.slurm.devcluster.cluster import stop_and_remove_cluster

    began = time.monotonic()
    paths = _get_devcluster_paths(arguments)
    if stop_and_remove_cluster(paths):
        print(f"removed {paths.root} after {time.monotonic() - began:.1f} s")
    else:
        print(f"there is no devcluster in {paths.root}")
    return 0


def _print_slurm_conf_export(arguments: argparse.Namespace) -> int:
    from areal_hpc.slurm.devcluster.cluster import read_plan
    from areal_hpc.slurm.devcluster.roots import get_programs_dir

    made = read_plan(_get_devcluster_paths(arguments))
    print(f"export SLURM_CONF={shlex.quote(str(made.paths.slurm_conf))}")
    if root := made.facts.slurm_root:
        print(f'export PATH={shlex.quote(get_programs_dir(root))}:"$PATH"')
    return 0


def _kill_devcluster_node(arguments: argparse.Namespace) -> int:
    from areal_hpc.slurm.devcluster.cluster import kill_node

    kill_node(_get_devcluster_paths(arguments), arguments.node, only_slurmd=arguments.only_slurmd)
    what = "has no slurmd" if arguments.only_slurmd else "is off"
    print(f"{arguments.node} {what}; slurmctld notices within half a minute")
    return 0


def _power_cycle_devcluster_node(arguments: argparse.Namespace) -> int:
    from areal_hpc.slurm.devcluster.cluster import power_cycle_node

    power_cycle_node(_get_devcluster_paths(arguments), arguments.node, arguments.timeout_s)
    print(f"{arguments.node} is up")
    return 0


def _print_devcluster_health(arguments: argparse.Namespace) -> int:
    from areal_hpc.slurm.devcluster.cluster import (
        list_component_health,
        read_plan,
        read_slurm_version,
    )

    made = read_plan(_get_devcluster_paths(arguments))
    found = list_component_health(made)
    for part in found:
        print(f"{part.name:<10} {part.state:<12} {part.note}".rstrip())
    settings = made.settings
    print(
        f"a node     {settings.cpus_per_node} CPUs and {settings.gpus_per_node} GPUs, claimed only"
    )
    if made.facts.limits_memory:
        print("memory     limited per job and node by cgroup v1")
    else:
        why = "no cgroup v1 to write to" if settings.namespaces else "nodes on loopback"
        print(f"memory     NOT limited ({why}): a job can exhaust this machine")
    print(f"Slurm      {read_slurm_version(made)}")
    print("CPU time   not limited: all nodes share this machine's processors")
    return 0 if all(part.is_well for part in found) else UNHEALTHY_EXIT_CODE


def _get_default_devcluster_dir() -> Path:
    return get_default_root(os.geteuid(), os.environ.get("XDG_RUNTIME_DIR"))


def _get_devcluster_paths(arguments: argparse.Namespace) -> DevclusterPaths:
    return DevclusterPaths(arguments.state_dir.absolute())


def _run_benchmark(arguments: argparse.Namespace) -> int:
    from areal_hpc.jobs.environment import get_interpreter

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
