"""Power on and off of nodes, and their Slurm states."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

import psutil

from areal_hpc.errors import RecipeError
from areal_hpc.slurm.devcluster import network, processes
from areal_hpc.slurm.devcluster.daemons import failure
from areal_hpc.slurm.devcluster.node_main import CGROUPS, CONTROLLERS
from areal_hpc.slurm.devcluster.paths import ClusterPaths
from areal_hpc.slurm.devcluster.plan import Node, Plan

UP_STATES = frozenset({"idle", "allocated", "mixed", "completing"})
"""States of a node that takes jobs or runs them. One that does not answer has a star as well."""

POLL_S = 0.1


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


def restart(made: Plan, node: Node) -> None:
    """Start a node anew, of which Slurm may still think that it runs its jobs."""
    power_off(made, node)
    # A machine takes longer to start than Slurm takes to miss it; one that is back at once keeps
    # jobs that no longer exist.
    lost = ("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=lost power")
    processes.run(lost, made.environ)
    power_on(made, node)


def await_up(made: Plan, wanted: Collection[Node], deadline: float) -> None:
    """Return when Slurm gives jobs to all of `wanted`.

    Raises:
        ClusterError: Not by `deadline` (of `time.monotonic`), or a node went away again.
    """
    while True:
        found = states(made)
        late = [node for node in wanted if found.get(node.name) not in UP_STATES]
        if not late:
            return
        for node in late:
            if processes.find(made.paths.process(node.name)) is None:
                raise failure(made.paths, node.name, "ended while it started")
        if time.monotonic() > deadline:
            state = found.get(late[0].name, "unknown to slurmctld")
            raise failure(made.paths, late[0].name, f"is {state}, not idle, at the deadline")
        time.sleep(POLL_S)
