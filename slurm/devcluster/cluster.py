"""Lifecycle of a devcluster: up, down, kill and restore nodes, health."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.errors import ClusterError, RecipeError
from slurm.devcluster import daemons, host, nodes, processes
from slurm.devcluster.paths import DevclusterPaths
from slurm.devcluster.plan import (
    DevclusterPlan,
    DevclusterSettings,
    dump_plan_inputs,
    parse_plan_inputs,
    plan_devcluster,
)

MAX_CANCEL_S = 3.0
"""Time that jobs get to end before the power is cut."""

CANCEL_POLL_S = 0.05


def start_cluster(
    paths: DevclusterPaths,
    requested_settings: Mapping[str, Any],
    timeout_s: float,
    print_line: Callable[[str], None],
) -> None:
    """Start whatever of the cluster does not run, and return when all nodes take jobs.

    A cluster that exists must have the `requested_settings`. `print_line` is told of each part
    that is up.
    """
    _create_or_check_state_dir(paths)
    with host.lock_host(), _lock_state(paths):
        began = time.monotonic()
        deadline = began + timeout_s
        made = _make_plan_and_write_config_files(paths, requested_settings)
        nodes.ensure_bridge(made)
        for daemon in made.daemons:
            daemons.start_daemon(made, daemon, deadline)
            print_line(f"{daemon.name:<10} up at {time.monotonic() - began:5.1f} s")
        for node in made.nodes:
            if nodes.find_slurmd_process(paths, node) is None:
                nodes.restart_node(made, node)
        nodes.wait_until_up(made, made.nodes, deadline)
        print_line(f"{f'{len(made.nodes)} nodes':<10} up at {time.monotonic() - began:5.1f} s")


def _create_or_check_state_dir(paths: DevclusterPaths) -> None:
    paths.root.mkdir(mode=0o755, parents=True, exist_ok=True)
    if paths.root.is_symlink() or paths.root.stat().st_uid != os.geteuid():
        raise RecipeError(
            f"expected a directory of your own, got {paths.root}",
            key="--state-dir",
            hint="name another one",
        )
    if not paths.made_of.exists() and any(paths.root.iterdir()):
        raise RecipeError(
            f"{paths.root} is neither empty nor a devcluster",
            key="--state-dir",
            hint="empty it or name another one: `down` removes all of it",
        )


@contextlib.contextmanager
def _lock_state(paths: DevclusterPaths) -> Iterator[None]:
    with processes.lock_folder(paths.root):
        if not paths.root.exists():
            raise ClusterError(f"another command removed {paths.root}", hint="repeat the command")
        yield


def _make_plan_and_write_config_files(
    paths: DevclusterPaths, requested_settings: Mapping[str, Any]
) -> DevclusterPlan:
    if paths.made_of.exists():
        settings, facts = parse_plan_inputs(paths.made_of.read_text())
        for key, value in requested_settings.items():
            if getattr(settings, key) != value:
                raise RecipeError(
                    f"expected {key}={getattr(settings, key)}, as the cluster in {paths.root} "
                    f"has, got {value}",
                    hint="areal-hpc devcluster down, or name another --state-dir",
                )
    else:
        settings = DevclusterSettings(
            **{"namespaces": host.can_create_namespaces(), **requested_settings}
        )
        host.require_commands(settings)
        facts = host.inspect_host(settings)
    made = plan_devcluster(settings, facts, paths)
    _write_config_files(made)
    return made


def _write_config_files(plan: DevclusterPlan) -> None:
    paths = plan.paths
    paths.made_of.write_text(
        dump_plan_inputs(plan.settings, plan.facts)
    )  # first: `down` goes by it
    folders = [paths.config_dir, paths.log_dir, paths.pid_dir, paths.munge_dir, paths.gpu_dir]
    folders += [paths.spool_dir, paths.controller_state]
    for folder in (*folders, *(paths.spool_dir / node.name for node in plan.nodes)):
        folder.mkdir(exist_ok=True)
    paths.munge_dir.chmod(0o755)  # munged refuses one that others can write to
    paths.database_dir.mkdir(mode=0o700, exist_ok=True)
    for number in range(plan.settings.gpus_per_node):
        with contextlib.suppress(FileExistsError):
            (paths.gpu_dir / f"gpu{number}").symlink_to("/dev/null")
    for path, text in plan.files.items():
        path.touch(mode=0o600)
        path.write_text(text)
        path.chmod(0o600 if path.name == "slurmdbd.conf" else 0o644)  # slurmdbd insists


def read_plan(paths: DevclusterPaths) -> DevclusterPlan:
    """The plan of the cluster that exists.

    Raises:
        RecipeError: There is none.
    """
    if not paths.made_of.exists():
        raise RecipeError(f"there is no devcluster in {paths.root}", hint="areal-hpc devcluster up")
    return plan_devcluster(*parse_plan_inputs(paths.made_of.read_text()), paths)


def read_slurm_version(plan: DevclusterPlan) -> str:
    return processes.run_command_unchecked(("slurmctld", "-V"), plan.environ).stdout.strip()


def stop_and_remove_cluster(paths: DevclusterPaths) -> bool:
    """Stop everything and remove every trace. Whether there was a cluster."""
    if not paths.made_of.exists():
        return False
    with _lock_state(paths):
        made = read_plan(paths)
        _cancel_all_jobs(made)
        for node in made.nodes:
            nodes.power_off(made, node)
        if made.facts.limits_memory:
            nodes.remove_cgroups(made.bridge)  # its group is called as its bridge
        for daemon in reversed(made.daemons):
            daemons.stop_daemon(made, daemon)
        nodes.remove_bridge(made)
        shutil.rmtree(paths.root)
    return True


def _cancel_all_jobs(plan: DevclusterPlan) -> None:
    if not daemons.is_running(plan, plan.daemons[-1]):
        return  # scancel would ask a slurmctld that is gone, again and again
    with contextlib.suppress(subprocess.TimeoutExpired):
        for partition in ("scavenger", "priority"):
            processes.run_command_unchecked(("scancel", f"--partition={partition}"), plan.environ)
        deadline = time.monotonic() + MAX_CANCEL_S
        while time.monotonic() < deadline:
            if not processes.run_command_unchecked(
                ("squeue", "-h", "-t", "R,CG,S"), plan.environ
            ).stdout:
                return
            time.sleep(CANCEL_POLL_S)


def kill_node(paths: DevclusterPaths, node_name: str, *, only_slurmd: bool = False) -> None:
    """Let a node lose its power; or, `only_slurmd`, let its jobs run on unseen by Slurm."""
    made = read_plan(paths)
    node = nodes.find_node(made, node_name)
    with _lock_state(paths):
        if not only_slurmd:
            nodes.power_off(made, node)
        elif slurmd := nodes.find_slurmd_process(paths, node):
            slurmd.send_signal(signal.SIGKILL)


def power_cycle_node(paths: DevclusterPaths, node_name: str, timeout_s: float) -> None:
    """Start a node anew, losing what still runs there, and return when it takes jobs."""
    made = read_plan(paths)
    node = nodes.find_node(made, node_name)
    with _lock_state(paths):
        nodes.restart_node(made, node)
        nodes.wait_until_up(made, [node], time.monotonic() + timeout_s)


@dataclass(frozen=True, slots=True)
class ComponentHealth:
    """Health of one daemon or node."""

    name: str
    state: str
    """`up`, `silent` (runs, does not answer) or `off`; of a node, what Slurm says."""
    is_well: bool
    note: str


def list_component_health(plan: DevclusterPlan) -> list[ComponentHealth]:
    """Every daemon, then every node."""
    found = []
    for daemon in plan.daemons:
        is_well = daemons.is_running(plan, daemon) and daemons.is_responding(plan, daemon)
        state = "up" if is_well else "silent" if daemons.is_running(plan, daemon) else "off"
        found.append(ComponentHealth(daemon.name, state, is_well, ""))
    states = nodes.read_node_states(plan)
    for node in plan.nodes:
        state = states.get(node.name, "unknown")
        if processes.find_recorded_process(plan.paths.process_record_file(node.name)) is None:
            note = "without power"
        elif nodes.find_slurmd_process(plan.paths, node) is None:
            note = "without slurmd"
        else:
            note = f"{node.address}:{node.port}"
        is_well = state in nodes.UP_STATES and not note.startswith("without")
        found.append(ComponentHealth(node.name, state, is_well, note))
    return found
