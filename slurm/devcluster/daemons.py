"""Start and stop of munged, mariadbd, slurmdbd and slurmctld."""

import subprocess
import time

from areal_hpc.errors import ClusterError
from slurm.devcluster import processes
from slurm.devcluster.paths import DevclusterPaths
from slurm.devcluster.plan import Daemon, DevclusterPlan

GRACE_S = 10.0
"""Time that a daemon gets to end by itself; MariaDB takes a second."""

POLL_S = 0.05
LOG_TAIL_LINES = 8


def is_running(plan: DevclusterPlan, daemon: Daemon) -> bool:
    return processes.find_recorded_process(plan.paths.process_record_file(daemon.name)) is not None


def is_responding(plan: DevclusterPlan, daemon: Daemon) -> bool:
    """Whether it does its work: it is asked for some."""
    try:
        return (
            processes.run_command_unchecked(daemon.ready_check_command, plan.environ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def start_daemon(plan: DevclusterPlan, daemon: Daemon, deadline: float) -> None:
    """Start a daemon that does not run; return when it answers.

    Raises:
        ClusterError: It ended, or did not answer by `deadline` (of `time.monotonic`).
    """
    paths = plan.paths
    if not is_running(plan, daemon):
        if daemon.prerequisite_path is not None and not daemon.prerequisite_path.exists():
            done = processes.run_command_unchecked(daemon.prerequisite_command, plan.environ)
            with paths.output_file(daemon.name).open("a") as sink:
                sink.write(done.stdout + done.stderr)
            if done.returncode:
                maker = daemon.prerequisite_command[0]
                what = f"lacks {daemon.prerequisite_path}: {maker} ended with {done.returncode}"
                raise build_daemon_error(paths, daemon.name, what)
        processes.spawn_and_record(
            daemon.command,
            plan.environ,
            paths.output_file(daemon.name),
            paths.process_record_file(daemon.name),
        )
    while not is_responding(plan, daemon):
        if not is_running(plan, daemon):
            raise build_daemon_error(paths, daemon.name, "ended while it started")
        if time.monotonic() > deadline:
            raise build_daemon_error(paths, daemon.name, "did not answer before the deadline")
        time.sleep(POLL_S)


def stop_daemon(plan: DevclusterPlan, daemon: Daemon) -> None:
    if process := processes.find_recorded_process(plan.paths.process_record_file(daemon.name)):
        processes.terminate(process, GRACE_S)


def build_daemon_error(
    paths: DevclusterPaths, daemon_or_node_name: str, problem: str
) -> ClusterError:
    """The error about a daemon or node, with the end of its logs."""
    lines: list[str] = []
    for path in (paths.log_file(daemon_or_node_name), paths.output_file(daemon_or_node_name)):
        if path.exists():
            lines += path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    words = "".join(f"\n    {line}" for line in lines) or " none"
    return ClusterError(
        f"{daemon_or_node_name} {problem}; end of its log:{words}",
        key=str(paths.log_dir),
        hint="fix the cause and repeat; `areal-hpc devcluster down` cleans up",
    )
