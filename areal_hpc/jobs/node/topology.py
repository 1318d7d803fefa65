"""Position of a process in its job: rank, node, reachable address."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.slurm.commands import run_slurm_command

LOOPBACK_ADDRESS = "127.0.0.1"
JOB_START_VARIABLE = "AREAL_HPC_JOB_START"
"""Variable that says which start of its job, or of its cell, a process belongs to."""


@dataclass(frozen=True, slots=True)
class TaskPosition:
    """One task among the tasks of its job (on Slurm: one srun task)."""

    rank: int
    num_tasks: int
    local_rank: int
    node_rank: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def get_task_position() -> TaskPosition:
    return _read_position(
        os.environ, "AREAL_HPC_", ("RANK", "NUM_TASKS", "LOCAL_RANK", "NODE_RANK")
    )


def _read_position(environ: Mapping[str, str], prefix: str, names: Sequence[str]) -> TaskPosition:
    lone = (0, 1, 0, 0)
    told = (int(environ.get(prefix + name, of)) for name, of in zip(names, lone, strict=True))
    return TaskPosition(*told)


def get_advertised_host() -> str:
    return os.environ.get("AREAL_HPC_HOST", LOOPBACK_ADDRESS)


def runs_on_one_node() -> bool:
    unsaid = "" if "SLURM_PROCID" in os.environ else "1"
    return os.environ.get("SLURM_STEP_NUM_NODES", unsaid) == "1"


def get_task_log_dir(default_dir: Path) -> Path:
    return Path(os.environ.get("AREAL_HPC_LOG_DIR", default_dir))


def get_job_start_number() -> int:
    return int(os.environ.get(JOB_START_VARIABLE, "0"))


def find_own_address(interface: str, environ: Mapping[str, str]) -> str:
    """The IPv4 address by which other nodes of the cluster reach this one.

    Asked in turn: `AREAL_HPC_HOST`; the named interface; what this host's name resolves to, unless
    that is loopback, as Debian's installer leaves it; what Slurm calls this node's address; the
    way to the node that srun runs on.

    Raises:
        RecipeError: There is no such interface, or it has no IPv4 address.
    """
    if host := environ.get("AREAL_HPC_HOST"):
        return host
    if interface:
        interfaces = psutil.net_if_addrs()
        for found in interfaces.get(interface, ()):
            if found.family == socket.AF_INET:
                return str(found.address)
        raise RecipeError(
            f"{socket.gethostname()} has no interface {interface} with an IPv4 address, it has "
            + ", ".join(sorted(interfaces)),
            key="cluster.slurm.network.interface",
            hint="name one of those that all nodes have, or leave it out",
        )
    return (
        _resolve_unless_loopback(socket.gethostname())
        or _find_slurm_address(environ.get("SLURMD_NODENAME", ""))
        or _find_address_towards(environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
        or LOOPBACK_ADDRESS
    )


def find_interface(address: str) -> str:
    """The network interface that has `address`; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return str(name)
    return ""


def _resolve_unless_loopback(host_name: str) -> str:
    try:
        found = socket.getaddrinfo(host_name, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return ""
    addresses = (str(entry[4][0]) for entry in found)
    return next((one for one in addresses if not ipaddress.ip_address(one).is_loopback), "")


def _find_slurm_address(node: str) -> str:
    """Slurm's NodeAddr, as an address; empty outside Slurm, and where it does not answer.

    Where all nodes are one machine it is loopback, and right.
    """
    if not node:
        return ""
    try:
        shown = run_slurm_command("scontrol", "show", "node", node, "--oneliner")
        found = re.search(r"\bNodeAddr=(\S+)", shown)
        return socket.gethostbyname(found[1]) if found else ""
    except (OSError, ClusterError):
        return ""


def _find_address_towards(peer: str) -> str:
    if not peer:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def get_slurm_restart_count(environ: Mapping[str, str]) -> int:
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def detect_task_position(environ: Mapping[str, str]) -> TaskPosition:
    if "SLURM_PROCID" in environ and "SUBMITIT_LOCAL_GLOBALID" not in environ:
        return _read_position(environ, "SLURM_", ("PROCID", "NTASKS", "LOCALID", "NODEID"))
    return _read_position(environ, "SUBMITIT_LOCAL_", ("GLOBALID", "NTASKS", "LOCALID", "NODEID"))
