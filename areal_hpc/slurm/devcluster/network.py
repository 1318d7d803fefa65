"""Bridge and virtual Ethernet of the nodes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil

from areal_hpc.errors import ClusterError
from areal_hpc.slurm.devcluster.plan import DevclusterNode, DevclusterPlan
from areal_hpc.slurm.devcluster.processes import list_descendants, run_command

MAX_UNSHARE_S = 10.0


def ensure_bridge(made: DevclusterPlan) -> None:
    """Make the bridge unless it is there."""
    if made.bridge and not _exists(made.bridge):
        _ip("link", "add", made.bridge, "type", "bridge")
        _ip("address", "add", made.bridge_address, "dev", made.bridge)
        _ip("link", "set", made.bridge, "up")


def remove_bridge(made: DevclusterPlan) -> None:
    """Remove the bridge if it is there."""
    if made.bridge and _exists(made.bridge):
        _ip("link", "delete", made.bridge)


def attach_node(
    made: DevclusterPlan, node: DevclusterNode, machine: subprocess.Popen[bytes]
) -> None:
    """Lead a cable from the bridge to `eth0` within the node's namespace.

    Raises:
        ClusterError: The namespace did not come to be.
    """
    deadline = time.monotonic() + MAX_UNSHARE_S
    # unshare forks once its namespaces exist; before that its network is the host's.
    while not (inside := list_descendants(psutil.Process(machine.pid))):
        if machine.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(
                f"{node.name} got no namespaces",
                key=str(made.paths.output(node.name)),
                hint="areal-hpc devcluster up --loopback does without",
            )
        time.sleep(0.005)
    peer = ("peer", "name", "eth0", "netns", str(inside[0].pid))
    _ip("link", "add", node.link, "type", "veth", *peer)
    _ip("link", "set", node.link, "master", made.bridge, "up")


def block_traffic(node: DevclusterNode) -> None:
    """Let nothing more through: a node without power does not say good-bye."""
    if node.link and _exists(node.link):
        _ip("link", "set", node.link, "down")


def detach_node(node: DevclusterNode) -> None:
    """Remove the cable. The kernel does so too, some time after the namespace's last process."""
    if node.link:
        _ip("link", "delete", node.link, may_fail=True)


def _exists(link: str) -> bool:
    return Path(f"/sys/class/net/{link}").exists()


def _ip(*arguments: str, may_fail: bool = False) -> None:
    done = run_command(("ip", *arguments), {})
    if done.returncode and not may_fail:
        raise ClusterError(
            f"ip {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}",
            hint="areal-hpc devcluster down, then up; --loopback does without a network",
        )
