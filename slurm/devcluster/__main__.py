"""`areal-hpc devcluster`: a local Slurm cluster for development and tests."""

import argparse
import os
import shlex
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

from areal_hpc.errors import ArealError
from areal_hpc.slurm.states import PROVEN_RELEASES
from slurm.devcluster.cluster import (
    kill_node,
    list_component_health,
    power_cycle_node,
    read_plan,
    read_slurm_version,
    start_cluster,
    stop_and_remove_cluster,
)
from slurm.devcluster.paths import DevclusterPaths, get_default_root
from slurm.devcluster.plan import DevclusterSettings
from slurm.devcluster.roots import get_programs_dir

UNHEALTHY_EXIT_CODE = 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc devcluster",
        description="A real Slurm of several nodes on this machine, from the distribution's "
        "packages (`make slurm` of a checkout). As root every node has a network, a host name "
        "and processes of its own; otherwise nodes share the loopback address.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument(
        "--state-dir",
        type=Path,
        default=_get_default_state_dir(),
        metavar="DIR",
        help="state directory (default: %(default)s)",
    )
    patience = argparse.ArgumentParser(add_help=False)
    patience.add_argument(
        "--timeout-s", type=float, default=60.0, metavar="S", help="timeout in seconds (60)"
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("node", help="such as n01")

    def add_action(
        name: str, run: object, help_text: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        action = actions.add_parser(name, parents=parents, help=help_text, description=help_text)
        action.set_defaults(run=run)
        return action

    up = add_action("up", _start, "start the cluster, or what is missing of it", place, patience)
    add_action("down", _stop_and_remove, "stop the cluster and remove all of its files", place)
    help_text = 'print the environment for Slurm clients: eval "$(areal-hpc devcluster env)"'
    add_action("env", _print_environment, help_text, place)
    help_text = "disconnect a node and kill its processes"
    kill = add_action("kill-node", _kill_node, help_text, place, named)
    help_text = "kill slurmd only; jobs keep running, unseen by Slurm"
    kill.add_argument("--only-slurmd", action="store_true", help=help_text)
    add_action("restore-node", _power_cycle_node, "start a node anew", place, named, patience)
    add_action("status", _print_health, "show the health of every daemon and node", place)
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
    return parser


def _start(arguments: argparse.Namespace) -> int:
    settings = {field.name for field in fields(DevclusterSettings)}
    asked = {name: value for name, value in vars(arguments).items() if name in settings}
    start_cluster(_get_paths(arguments), asked, arguments.timeout_s, partial(print, flush=True))
    given = arguments.state_dir
    option = "" if given == _get_default_state_dir() else f" --state-dir {shlex.quote(str(given))}"
    print(f"""to use it: eval "$(areal-hpc devcluster env{option})\"""")
    return 0


def _stop_and_remove(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    paths = _get_paths(arguments)
    if stop_and_remove_cluster(paths):
        print(f"removed {paths.root} after {time.monotonic() - began:.1f} s")
    else:
        print(f"there is no devcluster in {paths.root}")
    return 0


def _print_environment(arguments: argparse.Namespace) -> int:
    made = read_plan(_get_paths(arguments))
    print(f"export SLURM_CONF={shlex.quote(str(made.paths.slurm_conf))}")
    if root := made.facts.slurm_root:
        print(f'export PATH={shlex.quote(get_programs_dir(root))}:"$PATH"')
    return 0


def _kill_node(arguments: argparse.Namespace) -> int:
    kill_node(_get_paths(arguments), arguments.node, only_slurmd=arguments.only_slurmd)
    what = "has no slurmd" if arguments.only_slurmd else "is off"
    print(f"{arguments.node} {what}; slurmctld notices within half a minute")
    return 0


def _power_cycle_node(arguments: argparse.Namespace) -> int:
    power_cycle_node(_get_paths(arguments), arguments.node, arguments.timeout_s)
    print(f"{arguments.node} is up")
    return 0


def _print_health(arguments: argparse.Namespace) -> int:
    made = read_plan(_get_paths(arguments))
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


def _get_default_state_dir() -> Path:
    return get_default_root(os.geteuid(), os.environ.get("XDG_RUNTIME_DIR"))


def _get_paths(arguments: argparse.Namespace) -> DevclusterPaths:
    return DevclusterPaths(arguments.state_dir.absolute())


def main() -> int:
    arguments = build_parser().parse_args()
    try:
        code: int = arguments.run(arguments)
    except ArealError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
