"""Processes of one task: their files, their start, and their stop."""

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from areal_hpc.checkout import format_python_hint
from areal_hpc.errors import RecipeError
from areal_hpc.jobs.node import gpus
from areal_hpc.jobs.node.topology import (
    JOB_START_VARIABLE,
    TaskPosition,
    find_interface,
    find_own_address,
    get_slurm_restart_count,
)
from areal_hpc.jobs.processes.managed_process import ManagedProcess
from areal_hpc.jobs.starts import STOP_NOTE_VARIABLE
from areal_hpc.jobs.time_limit import CHECKPOINT_DURATION_FILE_VARIABLE
from areal_hpc.recipe.private_values import read_role_variables
from areal_hpc.rundir.atomic import write_atomic_private
from areal_hpc.rundir.folders import make_folder
from areal_hpc.rundir.jobs import LaunchFile, ProcessSpec
from areal_hpc.rundir.paths import ENVIRONMENTS, JobPaths, format_restart_dir

log = logging.getLogger(__name__)

END_POLL_S = 0.1
"""Between two looks whether processes that were told to stop have ended."""


class ProcessStarter:
    """Prepares and starts processes of a task."""

    def __init__(
        self,
        launch: LaunchFile,
        position: TaskPosition,
        build_environment: Callable[[], Mapping[str, str]],
    ) -> None:
        self._launch = launch
        self._position = position
        self._build_environment = build_environment
        self._surroundings: Mapping[str, str] = {}
        self._recipe_variables: dict[str, Mapping[str, str]] = {}
        self._begun_logs: set[Path] = set()

        self._log_dir = Path(launch.log_dir) / launch.job.name
        if launch.slurm is not None:
            self._log_dir /= format_restart_dir(get_slurm_restart_count(os.environ))

    def prepare_processes(self) -> list[ManagedProcess]:
        make_folder(self._log_dir)
        self._launch.paths.root.mkdir(exist_ok=True)
        own = ("all", "first" if self._position.is_first else "others")
        processes = self._launch.job.processes
        return [self._prepare_process(spec) for spec in processes if spec.tasks in own]

    def _prepare_process(self, spec: ProcessSpec) -> ManagedProcess:
        suffix = f"-{self._position.rank}" if self._position.num_tasks > 1 else ""
        config_path = self._launch.paths.process_config(f"{spec.name}{suffix}")
        # Agent arguments may hold keys of other services.
        write_atomic_private(config_path, msgspec.json.encode(spec.config))
        log_path = self._log_dir / f"{spec.name}{suffix}.log"
        if self._launch.slurm is not None and log_path not in self._begun_logs:
            self._begun_logs.add(log_path)
            node, job_id = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"]
            restart = get_slurm_restart_count(os.environ)
            with log_path.open("a") as stream:
                stream.write(f"node {node} job {job_id} restart {restart}\n")
        return ManagedProcess(spec, log_path, config_path)

    def start(self, process: ManagedProcess) -> None:
        """Start a process.

        Raises:
            RecipeError: Its interpreter or the site's network interface is missing, or the run's
                recipe is damaged.
            ClusterError: The shared storage refused to read or write what it needs.
        """
        spec = process.spec
        python = self._launch.pythons[spec.role]
        if shutil.which(python) is None:
            command = format_python_hint(python, ENVIRONMENTS[spec.role])
            raise RecipeError(
                f"no Python interpreter for role {spec.role}: {python}",
                key=f"cluster.{spec.role}.python",
                hint=f"{command}, or name the interpreter in the recipe",
            )
        self._surroundings = self._surroundings or self._build_environment()
        if self._launch.recipe and spec.role not in self._recipe_variables:
            variables = read_role_variables(Path(self._launch.recipe), spec.role)
            self._recipe_variables[spec.role] = variables
        position = self._position
        environ = {
            **os.environ,
            **self._surroundings,
            **build_visible_gpus_variable(spec, self._launch, position.rank),
            **select_role_variables(spec, self._launch.variables),
            **self._recipe_variables.get(spec.role, {}),
            "AREAL_HPC_RANK": str(position.rank),
            "AREAL_HPC_NUM_TASKS": str(position.num_tasks),
            "AREAL_HPC_LOCAL_RANK": str(position.local_rank),
            "AREAL_HPC_NODE_RANK": str(position.node_rank),
            "AREAL_HPC_LOG_DIR": str(self._log_dir),
            "PYTHONUNBUFFERED": "1",
        }
        process.start(python, environ)
        log.info("started %s (start %d)", spec.name, process.starts)


def build_start_environment(
    job: JobPaths, interface: str, start_number: int, stop_note: Path
) -> dict[str, str]:
    """What a job's processes must know of its start, and of the node: address, interface.

    gloo listens where the host's name leads, which may be nowhere.
    """
    host = find_own_address(interface, os.environ)
    own_interface = find_interface(host)
    return {
        **({"GLOO_SOCKET_IFNAME": own_interface} if own_interface else {}),
        "AREAL_HPC_HOST": host,
        JOB_START_VARIABLE: str(start_number),
        STOP_NOTE_VARIABLE: str(stop_note),
        CHECKPOINT_DURATION_FILE_VARIABLE: str(job.checkpoint_duration),
    }


def select_role_variables(
    spec: ProcessSpec, variables: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    starts_servers = spec.role == "agents" and spec.uses_gpus
    of_servers = variables.get("serve", {}) if starts_servers else {}
    return {**of_servers, **variables.get(spec.role, {})}


def build_visible_gpus_variable(spec: ProcessSpec, launch: LaunchFile, rank: int) -> dict[str, str]:
    """The variable that shows a process its task's GPUs and no others; nothing under Slurm.

    submitit's local executor hides every GPU of the machine from the jobs that it starts.
    """
    if launch.gpus is None:
        return {}
    return {gpus.VISIBLE_DEVICES_VARIABLE: ",".join(launch.gpus[rank] if spec.uses_gpus else ())}


def stop_processes(
    processes: Sequence[ManagedProcess], decide_grace_s: Callable[[], float]
) -> None:
    """SIGTERM to every process, SIGKILL to whole sessions after the grace."""
    for one in processes:
        if one.is_running:
            assert one.process is not None
            one.process.terminate()
    grace_s = decide_grace_s()  # asks Slurm, while they stop
    give_up_at = time.monotonic() + grace_s
    while any(one.is_running for one in processes) and time.monotonic() < give_up_at:
        time.sleep(END_POLL_S)
    for one in processes:
        one.signal_session(signal.SIGKILL)
        if one.process is not None:
            one.process.wait()
        one.kill_fork_server()
