"""Requirements of the host: commands, namespaces, memory, free ports and subnets."""

import ipaddress
import json
import os
import pwd
import shutil
import socket
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from areal_hpc.checkout import find_checkout
from areal_hpc.errors import ClusterError, RecipeError
from slurm.devcluster import processes
from slurm.devcluster.node_main import CGROUP_CONTROLLERS, CGROUP_ROOT
from slurm.devcluster.plan import DevclusterSettings, HostFacts, count_ports
from slurm.devcluster.roots import find_slurm_root

REQUIRED_COMMANDS = ("slurmctld", "slurmd", "srun", "munged", "mungekey")
DATABASE_COMMANDS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb-admin")
NAMESPACE_COMMANDS = ("ip", "unshare", "mount")

PORT_RANGE = range(20000, 32000)
"""Below those that the kernel gives to clients (/proc/sys/net/ipv4/ip_local_port_range)."""

_NAMESPACE_TRIAL_COMMAND = ("unshare", "--net", "--uts", "--pid", "--mount-proc", "--fork", "true")


def require_commands(settings: DevclusterSettings) -> None:
    """Find every command that a cluster needs.

    Raises:
        RecipeError: Some are not installed.
    """
    needed = [*REQUIRED_COMMANDS]
    needed += DATABASE_COMMANDS if settings.accounting else ()
    needed += NAMESPACE_COMMANDS if settings.namespaces else ()
    missing = [
        name for name in needed if shutil.which(name, path=processes.get_search_path()) is None
    ]
    if missing:
        raise RecipeError(
            f"not installed: {', '.join(missing)}",
            hint="make slurm, or sudo scripts/install_slurm.sh"
            if find_checkout()
            else "install Slurm and munge of the distribution, such as slurm-wlm of Debian",
        )


def can_create_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip", path=processes.get_search_path()) is None:
        return False
    return processes.run_command_unchecked(_NAMESPACE_TRIAL_COMMAND, {}).returncode == 0


def lock_host() -> AbstractContextManager[None]:
    """Be the only command on this machine that takes what `inspect_host` found free.

    Two that start at once would choose the same network and ports.
    """
    return processes.lock_folder(Path(tempfile.gettempdir()))  # every user may lock it


def inspect_host(settings: DevclusterSettings) -> HostFacts:
    """Look at the machine."""
    controls = [CGROUP_ROOT / name / "cgroup.procs" for name in CGROUP_CONTROLLERS]
    return HostFacts(
        hostname=socket.gethostname().partition(".")[0],
        user=pwd.getpwuid(os.geteuid()).pw_name,
        memory_mib=psutil.virtual_memory().total // 2**20,
        first_port=_find_free_port_block(count_ports(settings)),
        network=_find_free_subnet_number() if settings.namespaces else 0,
        limits_memory=settings.namespaces and all(os.access(path, os.W_OK) for path in controls),
        slurm_root=find_slurm_root(settings.slurm),
    )


def _find_free_port_block(count: int) -> int:
    for first in range(PORT_RANGE.start, PORT_RANGE.stop - count, 50):
        if all(_is_port_free(port) for port in range(first, first + count)):
            return first
    raise ClusterError(
        f"expected {count} free ports in a row between {PORT_RANGE.start} and {PORT_RANGE.stop}, "
        "got none",
        hint="ss -ltn shows who listens",
    )


def _is_port_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _find_free_subnet_number() -> int:
    listed = processes.run_command_unchecked(("ip", "-4", "-json", "route", "show"), {})
    listed.check_returncode()
    destinations = {route["dst"] for route in json.loads(listed.stdout)} - {"default"}
    routed = [ipaddress.IPv4Network(destination) for destination in destinations]
    for number in range(256):
        subnet = ipaddress.IPv4Network(f"10.77.{number}.0/24")
        has_bridge = Path(f"/sys/class/net/areal-dc{number}").exists()
        if not has_bridge and not any(subnet.overlaps(route) for route in routed):
            return number
    raise ClusterError(
        "expected a free subnet 10.77.N.0/24, got routes to all of them",
        hint="use --loopback, or remove devclusters that nobody needs",
    )
