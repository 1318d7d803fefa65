"""Main process of one node inside its namespaces.

It becomes the first process of the node's namespaces (or, on loopback, a subreaper), starts
slurmd and adopts whatever jobs leave behind. To kill its descendants and itself is to cut the
power. It outlives slurmd, as a machine does.

Runs as a file, isolated (`python -I node.py ORDER`), hence nothing but the standard library.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_CONTROLLERS = ("memory", "freezer")
"""With these of cgroup v1 Slurm holds jobs to their memory and finds all their processes."""


class NodeSetup(TypedDict):
    """Settings that make namespaces look like a machine."""

    name: str
    address: str
    """With its prefix length."""
    hosts: str
    """The file to be seen as /etc/hosts."""
    cgroup: str
    """Below every controller; empty for none."""
    memory_mib: int


def set_up_namespaces(machine: NodeSetup) -> None:
    """Give the namespaces a name, memory, the address of the cable `eth0`, and a hosts file.

    And shared memory of their own: programs take processes that share it for those of one node.
    """
    socket.sethostname(machine["name"])
    if machine["cgroup"]:
        for controller in CGROUP_CONTROLLERS:
            _enter_cgroup(CGROUP_ROOT / controller, machine)
    for command in (
        ("mount", "--bind", machine["hosts"], "/etc/hosts"),
        ("mount", "-t", "tmpfs", "-o", "mode=1777", "shm", "/dev/shm"),
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", machine["address"], "dev", "eth0"),
        ("ip", "link", "set", "eth0", "up"),
    ):
        subprocess.run(command, check=True)


def _enter_cgroup(controller: Path, machine: NodeSetup) -> None:
    group = controller / machine["cgroup"]
    group.mkdir(parents=True, exist_ok=True)
    if controller.name == "memory":
        limit_bytes = machine["memory_mib"] * 2**20
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text("0")
    subprocess.run(("mount", "--bind", group, controller), check=True)


def main() -> None:
    """Be the node described by the JSON object in the first argument."""
    order = json.loads(sys.argv[1])
    if not sys.stdin.readline():
        sys.exit("whoever started this node is gone")  # the cable is plugged in before the line
    if "machine" in order:
        set_up_namespaces(order["machine"])
    elif ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    slurmd = subprocess.Popen(order["slurmd"], stdin=subprocess.DEVNULL)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            signal.pause()
            continue
        if pid == slurmd.pid:
            code = os.waitstatus_to_exitcode(status)
            sys.stderr.write(f"slurmd ended with {code}; this node runs on without it\n")
            sys.stderr.flush()


if __name__ == "__main__":
    main()
