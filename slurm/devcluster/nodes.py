"""Power, cables and Slurm states of nodes, and the bridge between them."""

import contextlib
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

import psutil

from areal_hpc.errors import ClusterError, RecipeError
from slurm.devcluster import processes
from slurm.devcluster.daemons import build_daemon_error
from slurm.devcluster.node_main import CGROUP_CONTROLLERS, CGROUP_ROOT
from slurm.devcluster.paths import DevclusterPaths
from slurm.devcluster.plan import DevclusterNode, DevclusterPlan

UP_STATES = frozenset({"idle", "allocated", "mixed", "completing"})
"""States of a node that takes jobs or runs them. One that does not answer has a star as well."""

POLL_S = 0.1
MAX_UNSHARE_S = 10.0


def find_node(plan: DevclusterPlan, node_name: str) -> DevclusterNode:
    """The node of this name.

    Raises:
        RecipeError: There is none.
    """
    for node in plan.nodes:
        if node.name == node_name:
            return node
    raise RecipeError(
        f"expected one of {plan.nodes[0].name} to {plan.nodes[-1].name}, got {node_name}",
        hint="areal-hpc devcluster status",
    )


def power_off(plan: DevclusterPlan, node: DevclusterNode) -> None:
    """Cut the network, then kill every process of the node. Does nothing to one that is off."""
    block_traffic(node)
    if first := processes.find_recorded_process(plan.paths.process_record_file(node.name)):
        processes.kill_tree(first)
    disconnect_from_bridge(node)
    plan.paths.process_record_file(node.name).unlink(missing_ok=True)
    if node.cgroup:
        remove_cgroups(node.cgroup)


def remove_cgroups(cgroup_name: str) -> None:
    """Remove a control group with those inside, whose files are not files and vanish with them."""
    for group in (CGROUP_ROOT / controller / cgroup_name for controller in CGROUP_CONTROLLERS):
        if group.is_dir():
            for child in [path for path in group.rglob("*") if path.is_dir()][::-1]:
                child.rmdir()
            group.rmdir()


def find_slurmd_process(paths: DevclusterPaths, node: DevclusterNode) -> psutil.Process | None:
    """The node's slurmd, if both run."""
    first = processes.find_recorded_process(paths.process_record_file(node.name))
    for process in processes.list_running_descendants(first) if first else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "slurmd":
                return process
    return None


def read_node_states(plan: DevclusterPlan) -> dict[str, str]:
    """Node -> its state in sinfo's long words; empty while slurmctld does not answer."""
    try:
        listed = processes.run_command_unchecked(("sinfo", "-h", "-N", "-o", "%N %T"), plan.environ)
    except subprocess.TimeoutExpired:
        return {}
    return dict(line.split() for line in listed.stdout.splitlines())


def restart_node(plan: DevclusterPlan, node: DevclusterNode) -> None:
    """Start a node anew, of which Slurm may still think that it runs its jobs.

    It registers with slurmctld by itself.
    """
    power_off(plan, node)
    # A machine takes longer to start than Slurm takes to miss it; one that is back at once keeps
    # jobs that no longer exist.
    lost = ("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=lost power")
    processes.run_command_unchecked(lost, plan.environ)
    files = plan.paths.output_file(node.name), plan.paths.process_record_file(node.name)
    process = processes.spawn_and_record(node.command, plan.environ, *files, stdin=subprocess.PIPE)
    assert process.stdin is not None
    # Interrupted before the line, the pipe closes without it, and the node goes away again.
    with process.stdin as line:
        if node.link:
            connect_to_bridge(plan, node, process)
        line.write(b"start\n")


def wait_until_up(plan: DevclusterPlan, nodes: Collection[DevclusterNode], deadline: float) -> None:
    """Return when Slurm gives jobs to all of `nodes`.

    Raises:
        ClusterError: Not by `deadline` (of `time.monotonic`), or a node went away again.
    """
    while True:
        found = read_node_states(plan)
        late = [node for node in nodes if found.get(node.name) not in UP_STATES]
        if not late:
            return
        for node in late:
            if processes.find_recorded_process(plan.paths.process_record_file(node.name)) is None:
                raise build_daemon_error(plan.paths, node.name, "ended while it started")
        if time.monotonic() > deadline:
            state = found.get(late[0].name, "unknown to slurmctld")
            raise build_daemon_error(
                plan.paths, late[0].name, f"is {state}, not idle, at the deadline"
            )
        time.sleep(POLL_S)


def ensure_bridge(plan: DevclusterPlan) -> None:
    """Make the bridge unless it is there."""
    if plan.bridge and not _link_exists(plan.bridge):
        _call_ip("link", "add", plan.bridge, "type", "bridge")
        _call_ip("address", "add", plan.bridge_address, "dev", plan.bridge)
        _call_ip("link", "set", plan.bridge, "up")


def remove_bridge(plan: DevclusterPlan) -> None:
    if plan.bridge and _link_exists(plan.bridge):
        _call_ip("link", "delete", plan.bridge)


def connect_to_bridge(
    plan: DevclusterPlan, node: DevclusterNode, machine: subprocess.Popen[bytes]
) -> None:
    """Lead a cable from the bridge to `eth0` within the node's namespace.

    Raises:
        ClusterError: The namespace did not come to be.
    """
    deadline = time.monotonic() + MAX_UNSHARE_S
    # unshare forks once its namespaces exist; before that its network is the host's.
    while not (inside := processes.list_running_descendants(psutil.Process(machine.pid))):
        if machine.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(
                f"{node.name} got no namespaces",
                key=str(plan.paths.output_file(node.name)),
                hint="areal-hpc devcluster up --loopback does without",
            )
        time.sleep(0.005)
    peer = ("peer", "name", "eth0", "netns", str(inside[0].pid))
    _call_ip("link", "add", node.link, "type", "veth", *peer)
    _call_ip("link", "set", node.link, "master", plan.bridge, "up")


def block_traffic(node: DevclusterNode) -> None:
    if node.link and _link_exists(node.link):
        _call_ip("link", "set", node.link, "down")


def disconnect_from_bridge(node: DevclusterNode) -> None:
    if node.link:
        _call_ip("link", "delete", node.link, may_fail=True)


def _link_exists(link: str) -> bool:
    return Path(f"/sys/class/net/{link}").exists()


def _call_ip(*arguments: str, may_fail: bool = False) -> None:
    done = processes.run_command_unchecked(("ip", *arguments), {})
    if done.returncode and not may_fail:
        raise ClusterError(
            f"ip {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}",
            hint="areal-hpc devcluster down, then up; --loopback does without a network",
        )
