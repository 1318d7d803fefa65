"""The nodes: power on, power off, and what Slurm thinks of them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

import psutil

from areal_hpc.devcluster import network, processes
from areal_hpc.devcluster.daemons import failure
from areal_hpc.devcluster.node import CGROUPS, CONTROLLERS
from areal_hpc.devcluster.paths import ClusterPaths
from areal_hpc.devcluster.plan import Node, Plan
from areal_hpc.errors import RecipeError

UP_STATES = frozenset({"idle", "allocated", "mixed", "completing"})
"""States of a node that takes jobs or runs them. One that does not answer has a star as well."""

POLL_S = 0.1

CLOCK_SLACK_S = 1.0
"""slurmctld tells times in whole seconds."""


def node_named(made: Plan, name: str) -> Node:
    """The node of this name.

    Raises:
        RecipeError: There is none.
    """
    for node in made.nodes:
        if node.name == name:
            return node
    raise RecipeError(
        f"expected one of {made.nodes[0].name} to {made.nodes[-1].name}, got {name}",
        hint="areal-hpc devcluster status",
    )


def power_on(made: Plan, node: Node) -> None:
    """Start a node that is off. It registers with slurmctld by itself."""
    paths = made.paths
    record = paths.process(node.name)
    process = processes.spawn(node.command, made.environ, paths.output(node.name), record)
    # Interrupted before the line, the pipe closes without it, and the node goes away again.
    with processes.standard_input(process) as line:
        if node.link:
            network.plug_in(made, node, process)
        line.write(b"start\n")


def power_off(made: Plan, node: Node) -> None:
    """Cut the network, then kill every process of the node. Does nothing to one that is off."""
    network.cut(node)
    if first := processes.find(made.paths.process(node.name)):
        processes.fell(first)
    network.unplug(node)
    made.paths.process(node.name).unlink(missing_ok=True)
    if node.cgroup:
        for controller in CONTROLLERS:
            _remove_groups(CGROUPS / controller / node.cgroup)


def remove_cgroups(made: Plan) -> None:
    """Remove the groups that held those of the nodes, which are off."""
    for parent in {Path(node.cgroup).parent for node in made.nodes if node.cgroup}:
        for controller in CONTROLLERS:
            _remove_groups(CGROUPS / controller / parent)


def _remove_groups(group: Path) -> None:
    """Remove a tree of control groups, whose files are not files and vanish with them."""
    if group.is_dir():
        for child in [path for path in group.rglob("*") if path.is_dir()][::-1]:
            child.rmdir()
        group.rmdir()


def slurmd_of(paths: ClusterPaths, node: Node) -> psutil.Process | None:
    """The node's slurmd, if both run."""
    first = processes.find(paths.process(node.name))
    for process in processes.descendants(first) if first else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "slurmd":
                return process
    return None


def states(made: Plan) -> dict[str, str]:
    """Node -> its state in sinfo's long words; empty while slurmctld does not answer."""
    try:
        listed = processes.run(("sinfo", "-h", "-N", "-o", "%N %T"), made.environ)
    except subprocess.TimeoutExpired:
        return {}
    return dict(line.split() for line in listed.stdout.splitlines())


def await_up(made: Plan, wanted: Collection[Node], deadline: float) -> None:
    """Return when Slurm gives jobs to the slurmds of `wanted` that run now.

    Raises:
        ClusterError: Not by `deadline` (of `time.monotonic`), or a node went away again.
    """
    while True:
        found = states(made)
        late = [
            node
            for node in wanted
            if found.get(node.name) not in UP_STATES or not _is_registered(made, node)
        ]
        if not late:
            return
        for node in late:
            if processes.find(made.paths.process(node.name)) is None:
                raise failure(made.paths, node.name, "ended while it started")
        if time.monotonic() > deadline:
            state = found.get(late[0].name, "unknown to slurmctld")
            raise failure(made.paths, late[0].name, f"did not register in time and is {state}")
        time.sleep(POLL_S)


def _is_registered(made: Plan, node: Node) -> bool:
    """Whether slurmctld has heard of this slurmd, and not only of one before it."""
    slurmd = slurmd_of(made.paths, node)
    shown = processes.run(("scontrol", "show", "node", node.name), made.environ).stdout
    known_since = re.search(r"SlurmdStartTime=(\d\S+)", shown)
    if slurmd is None or known_since is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        started = datetime.fromtimestamp(slurmd.create_time() - CLOCK_SLACK_S)
        return datetime.fromisoformat(known_since[1]) >= started
    return False
