"""The node of a process: its GPUs, its address, and the position of the task on it."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import psutil

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.recipe.sections.cluster import WantedGpus
from areal_hpc.slurm.commands import run_slurm_command

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES_DIR = Path("/dev")
DRIVER_GPUS_DIR = Path("/proc/driver/nvidia/gpus")
"""Folder with an entry per GPU of the machine, named by its PCI address (`0000:1b:00.0`)."""
PCI_DEVICES_DIR = Path("/sys/bus/pci/devices")
_DEVICE_LIST_TERMINATORS = ("", "-1", "NoDevFiles")
"""Values in the variable that hide themselves and all after them; Slurm writes the last one."""


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    ids: tuple[str, ...]
    """Numbers, or names such as `GPU-8932f937-...`, as in CUDA_VISIBLE_DEVICES."""
    source: str
    """Origin of the list, for messages."""


def find_visible_gpus(environ: Mapping[str, str], devices_dir: Path = DEVICES_DIR) -> VisibleGpus:
    """Find the GPUs that the variable names or, if it is not set, those with a device file."""
    ids = parse_visible_device_ids(environ)
    if ids is not None:
        return VisibleGpus(ids, f"{VISIBLE_DEVICES_VARIABLE}={environ[VISIBLE_DEVICES_VARIABLE]!r}")
    # CUDA numbers the GPUs that it may open from 0; device files in a container may differ.
    return VisibleGpus(
        tuple(map(str, range(len(list_device_files(devices_dir))))), f"{devices_dir}/nvidia[0-9]*"
    )


def parse_visible_device_ids(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Parse the GPUs that the variable names, each once; None, which hides none, if not set."""
    if VISIBLE_DEVICES_VARIABLE not in environ:
        return None
    names = (name.strip() for name in environ[VISIBLE_DEVICES_VARIABLE].split(","))
    return tuple(dict.fromkeys(takewhile(lambda name: name not in _DEVICE_LIST_TERMINATORS, names)))


def list_device_files(devices_dir: Path = DEVICES_DIR) -> list[Path]:
    return sorted(devices_dir.glob("nvidia[0-9]*"))


def select_wanted_gpus(
    visible_gpus: VisibleGpus, wanted_gpus: WantedGpus, numa_node_by_gpu: Mapping[str, int]
) -> VisibleGpus:
    """Select the visible GPUs that a run may use, in the order in which it takes them.

    GPUs of one NUMA node are neighbors if `numa_node_by_gpu` has them, so that a replica or
    neighboring ranks cross as few sockets as possible. GPUs that the recipe lists keep its order.

    Raises:
        RecipeError: A GPU that the recipe names is not visible, or there are too few.
    """
    if wanted_gpus == "none":
        return VisibleGpus((), "cluster.gpus=none")
    if isinstance(wanted_gpus, tuple):
        names = tuple(map(str, wanted_gpus))
        if hidden := [name for name in names if name not in visible_gpus.ids]:
            raise RecipeError(
                f"cluster.gpus names GPUs {', '.join(hidden)}; this machine shows "
                f"{', '.join(visible_gpus.ids) or 'none'} ({visible_gpus.source})",
                key="cluster.gpus",
                hint="name some of those that it shows, or use cluster.gpus=auto",
            )
        return VisibleGpus(names, f"cluster.gpus=[{', '.join(names)}]")
    ordered = tuple(sorted(visible_gpus.ids, key=lambda gpu: numa_node_by_gpu.get(gpu, -1)))
    if wanted_gpus == "auto":
        return VisibleGpus(ordered, visible_gpus.source)
    if wanted_gpus > len(ordered):
        raise RecipeError(
            f"cluster.gpus={wanted_gpus}; "
            f"this machine shows {len(ordered)} GPUs ({visible_gpus.source})",
            key="cluster.gpus",
            hint=f"use cluster.gpus={len(ordered) or 'none'}",
        )
    return VisibleGpus(
        ordered[:wanted_gpus], f"cluster.gpus={wanted_gpus} of {visible_gpus.source}"
    )


def read_numa_nodes(
    devices_dir: Path = DEVICES_DIR, driver: Path = DRIVER_GPUS_DIR, pci: Path = PCI_DEVICES_DIR
) -> dict[str, int]:
    """Read the NUMA node of each GPU, numbered in the order of PCI addresses; empty if unknown.

    In a container that shows only some of the machine's GPUs the numbers differ: also unknown.
    """
    addresses = sorted(path.name for path in driver.glob("*"))
    if len(addresses) != len(list_device_files(devices_dir)):
        return {}
    try:
        nodes = [int((pci / address.lower() / "numa_node").read_text()) for address in addresses]
    except (OSError, ValueError):
        return {}
    return {str(number): node for number, node in enumerate(nodes)}


LOOPBACK_ADDRESS = "127.0.0.1"
JOB_START_VARIABLE = "AREAL_HPC_JOB_START"
"""Variable with the number of the start, of its job or cell, that a process belongs to."""


@dataclass(frozen=True, slots=True)
class TaskPosition:
    """Position of a task among the tasks of its job (on Slurm: of srun)."""

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
    defaults = zip(names, (0, 1, 0, 0), strict=True)
    return TaskPosition(*(int(environ.get(prefix + name, number)) for name, number in defaults))


def get_advertised_host() -> str:
    return os.environ.get("AREAL_HPC_HOST", LOOPBACK_ADDRESS)


def runs_on_one_node() -> bool:
    default = "" if "SLURM_PROCID" in os.environ else "1"
    return os.environ.get("SLURM_STEP_NUM_NODES", default) == "1"


def get_task_log_dir(default_dir: Path) -> Path:
    return Path(os.environ.get("AREAL_HPC_LOG_DIR", default_dir))


def get_job_start_number() -> int:
    return int(os.environ.get(JOB_START_VARIABLE, "0"))


def find_own_address(interface: str, environ: Mapping[str, str]) -> str:
    """Find the IPv4 address by which other nodes of the cluster reach this one.

    The sources are, in this order: `AREAL_HPC_HOST`; the named interface; the host's name, unless
    it resolves to loopback, as Debian's installer configures it; Slurm's address of this node; the
    route to the node that srun runs on.
    """
    if host := environ.get("AREAL_HPC_HOST"):
        return host
    if interface:
        interfaces = psutil.net_if_addrs()
        for address in interfaces.get(interface, ()):
            if address.family == socket.AF_INET:
                return str(address.address)
        raise RecipeError(
            f"{socket.gethostname()} has no interface {interface} with an IPv4 address, it has "
            + ", ".join(sorted(interfaces)),
            key="cluster.slurm.network.interface",
            hint="name one of those that all nodes have, or leave it out",
        )
    return (
        _resolve_host_name(socket.gethostname())
        or _find_slurm_address(environ.get("SLURMD_NODENAME", ""))
        or _find_address_towards(environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
        or LOOPBACK_ADDRESS
    )


def find_interface(address: str) -> str:
    """Find the network interface that has `address`; empty if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return ""


def _resolve_host_name(host_name: str) -> str:
    try:
        found = socket.getaddrinfo(host_name, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return ""
    addresses = (str(entry[4][0]) for entry in found)
    outside = (text for text in addresses if not ipaddress.ip_address(text).is_loopback)
    return next(outside, "")


def _find_slurm_address(node: str) -> str:
    """Resolve Slurm's NodeAddr; empty outside Slurm, and if it does not answer.

    If all nodes are one machine it is loopback, which is right.
    """
    if not node:
        return ""
    try:
        output = run_slurm_command("scontrol", "show", "node", node, "--oneliner")
        match = re.search(r"\bNodeAddr=(\S+)", output)
        return socket.gethostbyname(match[1]) if match else ""
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
