"""Plan of a devcluster: configuration files and processes.

`templates/` holds the files' templates. Why single settings are as they are stands there.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import jinja2

from areal_hpc.errors import RecipeError
from slurm.devcluster import processes, roots
from slurm.devcluster.node_main import NodeSetup
from slurm.devcluster.paths import DevclusterPaths

MAX_NODES = 200
"""What one subnet of 256 addresses and the names n01 to n200 have room for."""

MAX_SOCKET_PATH_BYTES = 107
"""Bytes of a socket's path that Linux takes (unix(7), sun_path)."""

NAMESPACE_SLURMD_PORT = 6818
"""Slurm's own; in namespaces every node has it to itself."""

LOOPBACK = "127.0.0.1"

ACCOUNTING_ONLY_FILES = ("slurmdbd.conf", "mariadb.cnf")
"""Only a cluster with accounting has these."""

NAMESPACE_ONLY_FILES = ("hosts",)
"""Only nodes with an /etc of their own have these."""

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True, slots=True)
class DevclusterSettings:
    """Settings of a devcluster, as the user gives them."""

    nodes: int = 4
    gpus_per_node: int = 8
    cpus_per_node: int = 16
    """Claimed, not there: what they run shares the machine's processors."""
    grace_s: int = 15
    """Between the signal of a preemption and the kill."""
    accounting: bool = True
    """With slurmdbd and a MariaDB."""
    namespaces: bool = True
    """One network, host-name, process and mount namespace per node; otherwise loopback ports."""
    slurm: str = ""
    """Release of Slurm, one of `versions.PROVEN_RELEASES`; empty for the machine's own."""

    def __post_init__(self) -> None:
        for key, least, most in (
            ("nodes", 1, MAX_NODES),
            ("gpus_per_node", 1, 64),
            ("cpus_per_node", 1, 1024),
            ("grace_s", 0, 3600),
        ):
            value = getattr(self, key)
            if not least <= value <= most:
                raise RecipeError(
                    f"expected {least} to {most}, got {value}",
                    key=f"--{key.replace('_', '-')}",
                    hint="areal-hpc devcluster up --help",
                )


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about the machine on which the cluster starts."""

    hostname: str
    user: str
    memory_mib: int
    first_port: int
    """The first of `count_ports` free ones."""
    network: int
    """The N of the bridge `areal-dcN` and its subnet 10.77.N.0/24; both were free."""
    limits_memory: bool
    """The controllers of cgroup v1 that `node_main.py` names are ours to write."""
    slurm_root: str = ""
    """Folder with the Slurm that is not the machine's own; empty if it is."""


@dataclass(frozen=True, slots=True)
class DevclusterNode:
    """One slurmd, and the machine it thinks it is."""

    name: str
    address: str
    port: int
    link: str
    """The bridge's end of its cable; empty on loopback."""
    cgroup: str
    """Its control group below every controller; empty where memory is not limited."""
    command: tuple[str, ...]
    """What starts `node_main.py`, whose descendants are all that runs on the node."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """One process beside the nodes."""

    name: str
    command: tuple[str, ...]
    """Stays in the foreground."""
    ready_check_command: tuple[str, ...]
    """Ends with 0 when the daemon answers."""
    prerequisite_path: Path | None = None
    """Something that `prerequisite_command` makes, unless it is there."""
    prerequisite_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DevclusterPlan:
    """Plan of a cluster: all that is decided before it starts."""

    settings: DevclusterSettings
    facts: HostFacts
    paths: DevclusterPaths
    files: Mapping[Path, str]
    daemons: tuple[Daemon, ...]
    """In the order in which they start."""
    nodes: tuple[DevclusterNode, ...]
    environ: Mapping[str, str]
    """Added to the environment of every daemon and node."""
    bridge: str
    """Empty on loopback."""
    bridge_address: str
    """The host's address on the bridge, with its prefix length."""


def count_ports(settings: DevclusterSettings) -> int:
    return 2 + (0 if settings.namespaces else settings.nodes)


def plan_devcluster(
    settings: DevclusterSettings, host_facts: HostFacts, paths: DevclusterPaths
) -> DevclusterPlan:
    """Decide everything."""
    _require_sizes_within_limits(settings, host_facts, paths)
    nodes = tuple(
        _plan_node(settings, host_facts, paths, number) for number in range(settings.nodes)
    )
    controller_address = f"10.77.{host_facts.network}.1" if settings.namespaces else LOOPBACK
    words = {
        "settings": settings,
        "facts": host_facts,
        "paths": paths,
        "nodes": nodes,
        "controller_address": controller_address,
        "controller_port": host_facts.first_port,
        "accounting_port": host_facts.first_port + 1,
        "node_memory_mib": _compute_node_memory_mib(settings, host_facts),
        "plugin_dir": roots.get_plugin_dir(host_facts.slurm_root) if host_facts.slurm_root else "",
    }
    environ = {"SLURM_CONF": str(paths.slurm_conf)}
    if host_facts.slurm_root:
        programs = roots.get_programs_dir(host_facts.slurm_root)
        environ["PATH"] = os.pathsep.join((programs, processes.get_search_path()))
    if settings.accounting:
        environ["MYSQL_UNIX_PORT"] = str(paths.database_socket)
    return DevclusterPlan(
        settings=settings,
        facts=host_facts,
        paths=paths,
        files={
            paths.config_file(name): _TEMPLATES.get_template(f"{name}.j2").render(words)
            for name in (template.removesuffix(".j2") for template in _TEMPLATES.list_templates())
            if (settings.accounting or name not in ACCOUNTING_ONLY_FILES)
            and (settings.namespaces or name not in NAMESPACE_ONLY_FILES)
        },
        daemons=_plan_daemons(settings, host_facts, paths),
        nodes=nodes,
        environ=environ,
        bridge=f"areal-dc{host_facts.network}" if settings.namespaces else "",
        bridge_address=f"{controller_address}/24" if settings.namespaces else "",
    )


def _require_sizes_within_limits(
    settings: DevclusterSettings, host_facts: HostFacts, paths: DevclusterPaths
) -> None:
    longest = max(paths.munge_socket, paths.database_socket, key=lambda path: len(bytes(path)))
    if len(bytes(longest)) > MAX_SOCKET_PATH_BYTES:
        raise RecipeError(
            f"expected a socket's path of at most {MAX_SOCKET_PATH_BYTES} bytes, "
            f"got {len(bytes(longest))}: {longest}",
            key="--state-dir",
            hint="name a directory closer to the root",
        )
    if _compute_node_memory_mib(settings, host_facts) < settings.cpus_per_node:
        raise RecipeError(
            f"expected 1 MiB of memory for each CPU of a node, got {host_facts.memory_mib} MiB "
            f"for {settings.nodes} nodes of {settings.cpus_per_node} CPUs",
            key="--nodes",
            hint="ask for fewer nodes",
        )


def _compute_node_memory_mib(settings: DevclusterSettings, host_facts: HostFacts) -> int:
    return host_facts.memory_mib // settings.nodes


def _plan_node(
    settings: DevclusterSettings, host_facts: HostFacts, paths: DevclusterPaths, node_number: int
) -> DevclusterNode:
    name = f"n{node_number + 1:02d}"
    slurmd: tuple[str, ...] = ("slurmd", "-D", "-N", name)
    if host_facts.slurm_root:  # it would start that of its own release's place
        slurmd += ("-d", f"{roots.get_programs_dir(host_facts.slurm_root)}/slurmstepd")
    program = (sys.executable, "-I", str(Path(__file__).with_name("node_main.py")))
    if not settings.namespaces:
        order = json.dumps({"slurmd": slurmd})
        port = host_facts.first_port + 2 + node_number
        return DevclusterNode(name, LOOPBACK, port, link="", cgroup="", command=(*program, order))
    address = f"10.77.{host_facts.network}.{node_number + 2}"
    cgroup = f"areal-dc{host_facts.network}/{name}" if host_facts.limits_memory else ""
    machine = NodeSetup(
        name=name,
        address=f"{address}/24",
        hosts=str(paths.config_file("hosts")),
        cgroup=cgroup,
        memory_mib=_compute_node_memory_mib(settings, host_facts),
    )
    order = json.dumps({"slurmd": slurmd, "machine": machine})
    unshare = ("unshare", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child")
    return DevclusterNode(
        name,
        address,
        NAMESPACE_SLURMD_PORT,
        link=f"adc{host_facts.network}-{name}",
        cgroup=cgroup,
        command=(*unshare, *program, order),
    )


def _plan_daemons(
    settings: DevclusterSettings, host_facts: HostFacts, paths: DevclusterPaths
) -> tuple[Daemon, ...]:
    # --force: munged wants a socket that all users reach, and $XDG_RUNTIME_DIR is private.
    munged = Daemon(
        "munged",
        (
            *("munged", "--foreground", "--force", "--num-threads=2"),
            f"--socket={paths.munge_socket}",
            f"--key-file={paths.munge_key}",
            f"--seed-file={paths.munge_dir / 'seed'}",
            f"--pid-file={paths.pid_dir / 'munged.pid'}",
        ),
        ready_check_command=("munge", "--no-input", f"--socket={paths.munge_socket}"),
        prerequisite_path=paths.munge_key,
        prerequisite_command=("mungekey", "--create", f"--keyfile={paths.munge_key}"),
    )
    slurmctld = Daemon("slurmctld", ("slurmctld", "-D"), ready_check_command=("scontrol", "ping"))
    if not settings.accounting:
        return (munged, slurmctld)
    mariadb_config = f"--defaults-file={paths.config_file('mariadb.cnf')}"
    mariadbd = Daemon(
        "mariadbd",
        ("mariadbd", mariadb_config),
        ready_check_command=(
            *("mariadb-admin", "--no-defaults", f"--user={host_facts.user}"),
            *(f"--socket={paths.database_socket}", "ping"),
        ),
        prerequisite_path=paths.database_dir / "mysql",
        prerequisite_command=(
            *("mariadb-install-db", mariadb_config, "--skip-test-db"),
            *(
                "--auth-root-authentication-method=socket",
                f"--auth-root-socket-user={host_facts.user}",
            ),
        ),
    )
    slurmdbd = Daemon(
        "slurmdbd", ("slurmdbd", "-D"), ready_check_command=("sacctmgr", "-n", "list", "cluster")
    )
    return (munged, mariadbd, slurmdbd, slurmctld)


def dump_plan_inputs(settings: DevclusterSettings, host_facts: HostFacts) -> str:
    return json.dumps({"settings": asdict(settings), "facts": asdict(host_facts)}, indent=2) + "\n"


def parse_plan_inputs(text: str) -> tuple[DevclusterSettings, HostFacts]:
    kept = json.loads(text)
    return DevclusterSettings(**kept["settings"]), HostFacts(**kept["facts"])
