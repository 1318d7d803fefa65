"""Processes of one task: their files, their start by `exec` or a fork server, and their stop."""

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.checkout import format_python_hint
from areal_hpc.errors import RecipeError
from areal_hpc.jobs import node
from areal_hpc.jobs.node import (
    JOB_START_VARIABLE,
    TaskPosition,
    find_interface,
    find_own_address,
    get_slurm_restart_count,
)
from areal_hpc.jobs.processes.fork_server import (
    FORK_SERVER_MAIN,
    PRELOAD_OPTION,
    START_REQUEST,
    ForkReply,
)
from areal_hpc.jobs.processes.process_main import PARENT_VARIABLE, PROCESS_MAIN
from areal_hpc.jobs.processes.stack_dumps import request_stacks
from areal_hpc.jobs.starts import CHECKPOINT_DURATION_FILE_VARIABLE, STOP_NOTE_VARIABLE
from areal_hpc.recipe.keys import read_role_variables
from areal_hpc.rundir.files import make_folder, write_atomic_private
from areal_hpc.rundir.jobs import LaunchFile, ProcessSpec
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.rundir.paths import (
    ENVIRONMENTS,
    JobPaths,
    format_restart_dir,
    get_process_error_path,
)
from areal_hpc.wire.decoding import decode_json

log = logging.getLogger(__name__)

_MAX_REPLY_BYTES = 4096
_POLL_S = 0.05
_LOG_TAIL_BYTES = 64 * 1024
"""Bytes read of the log of a process that left no error file: an agent may have written GBs."""
_KILL_TIMEOUT_S = 30.0
"""Longest wait for the end of a killed process, which may have to release devices first."""


class ForkServerClient:
    """Client of a fork server that controls the process forked last, like `Popen`."""

    def __init__(
        self,
        python: str,
        entry: str,
        config_path: Path,
        log_path: Path,
        environ: Mapping[str, str],
    ) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            *(python, "-m", FORK_SERVER_MAIN, f"{PRELOAD_OPTION}{entry}"),
            *(str(config_path), str(theirs.fileno())),
        ]
        self._server = _start_session(command, log_path, environ, theirs.fileno())
        theirs.close()
        self.pid: int | None = None
        """Process id of the forked process; None until it has begun."""
        self._exit_code: int | None = None

    @property
    def is_server_alive(self) -> bool:
        return self._server.poll() is None

    def start_process(self) -> None:
        self.pid = self._exit_code = None
        with contextlib.suppress(BrokenPipeError):  # the server died, which `poll` notices
            self._channel.send(START_REQUEST)

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs or is about to start.

        If its server died the process is killed, and counts as killed in any case.
        """
        while self._exit_code is None and select.select([self._channel], [], [], 0)[0]:
            try:
                content = self._channel.recv(_MAX_REPLY_BYTES)
            except ConnectionResetError:
                content = b""
            if not content:
                self._exit_code = -signal.SIGKILL
                if self.pid is not None:
                    _signal_process_group(self.pid, signal.SIGKILL)
                break
            reply = decode_json(content, ForkReply)
            self.pid, self._exit_code = reply.pid, reply.exit_code
        return self._exit_code

    def terminate(self) -> None:
        """Send SIGTERM to the process, or keep it from starting."""
        if self.poll() is not None:
            return
        if self.pid is None:
            self._server.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def signal_session(self, signal_number: int) -> None:
        """Signal the process and its session, or keep it from starting."""
        if self.poll() is not None:
            return  # the server has killed what was left
        if self.pid is None:
            self._server.kill()
        else:
            _signal_process_group(self.pid, signal_number)

    def wait(self) -> int:
        """Wait for the killed process and return its exit code; kill a server that hangs."""
        give_up_at = time.monotonic() + _KILL_TIMEOUT_S
        while (code := self.poll()) is None:
            select.select([self._channel], [], [], _POLL_S)
            if time.monotonic() >= give_up_at:
                self._server.kill()
        return code

    def kill_server(self) -> None:
        self._server.kill()
        self._server.wait()
        self._channel.close()


class ExecutedProcess:
    """Process that was started as a program of its own, with the same interface."""

    def __init__(
        self,
        python: str,
        entry: str,
        config_path: Path,
        log_path: Path,
        environ: Mapping[str, str],
    ) -> None:
        command = [python, "-m", PROCESS_MAIN, entry, str(config_path)]
        self._process = _start_session(command, log_path, environ)
        self.pid = self._process.pid
        self.poll = self._process.poll
        self.terminate = self._process.terminate
        self.wait = self._process.wait

    def signal_session(self, signal_number: int) -> None:
        _signal_process_group(self._process.pid, signal_number)


def _start_session(
    command: list[str], log_path: Path, environ: Mapping[str, str], *descriptors: int
) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log_file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env={**environ, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
            pass_fds=descriptors,
        )


def _signal_process_group(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal_number)


@dataclass(slots=True)
class ManagedProcess:
    """Process of a task, with counts of its starts and of its recent crashes."""

    spec: ProcessSpec
    log_path: Path
    config_path: Path
    starts: int = 0
    started_at: float = 0.0
    crashes_without_progress: int = 0
    not_before: float = 0.0
    process: ExecutedProcess | ForkServerClient | None = None
    """Current start; None between two starts."""
    is_killed_for_restart: bool = False
    """Whether it is being killed and starts again once it has ended."""
    ended_at: float | None = None
    """Time at which the end of the current start was noticed."""
    _progress_bytes: int = 0
    _server: ForkServerClient | None = None

    def start(self, python: str, environ: Mapping[str, str]) -> None:
        self.starts += 1
        self.started_at = time.monotonic()
        self.is_killed_for_restart, self.ended_at = False, None
        self._progress_bytes = max(self._progress_bytes, self._read_progress_bytes())
        get_process_error_path(self.config_path).unlink(missing_ok=True)
        start = (python, self.spec.entry, self.config_path, self.log_path, environ)
        if not self.spec.is_forked:
            self.process = ExecutedProcess(*start)
            return
        if self._server is None or not self._server.is_server_alive:
            self.kill_fork_server()
            self._server = ForkServerClient(*start)
        self._server.start_process()
        self.process = self._server

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal_session(self, signal_number: int) -> None:
        if self.process is not None:
            self.process.signal_session(signal_number)

    def request_stacks(self) -> None:
        """Ask the process for its stacks, and SGLang below it; not programs of users."""
        if self.process is not None and self.process.pid is not None:
            request_stacks(self.process.pid, with_descendants=self.spec.uses_gpus)

    def made_progress(self) -> bool:
        return self._read_progress_bytes() > self._progress_bytes

    def _read_progress_bytes(self) -> int:
        try:
            return Path(self.spec.progress).stat().st_size if self.spec.progress else 0
        except FileNotFoundError:
            return 0

    @property
    def has_written_error_file(self) -> bool:
        return get_process_error_path(self.config_path).exists()

    def read_last_words(self) -> str:
        """Return the error that the process left, or the end of its log."""
        error_file = get_process_error_path(self.config_path)
        if error_file.exists():
            return error_file.read_text()
        tail = read_tail_lines(self.log_path, _LOG_TAIL_BYTES)
        return "\n".join(tail.decode(errors="replace").splitlines()[-12:])

    def kill_fork_server(self) -> None:
        if self._server is not None:
            self._server.kill_server()
            self._server = None


END_POLL_S = 0.1
"""Time between two looks at stopping processes."""


class ProcessStarter:
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
            ClusterError: The shared storage refused to read or write a file.
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
    """Build the variables of a job's start, and of the node's address and interface.

    gloo listens at the address of the host's name, which may not exist.
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
    """Build the variable that shows a process only its task's GPUs; nothing under Slurm.

    submitit's local executor hides every GPU of the machine from the jobs that it starts.
    """
    if launch.gpus is None:
        return {}
    return {node.VISIBLE_DEVICES_VARIABLE: ",".join(launch.gpus[rank] if spec.uses_gpus else ())}


def stop_processes(
    processes: Sequence[ManagedProcess], decide_grace_s: Callable[[], float]
) -> None:
    """Send SIGTERM to every process, and SIGKILL to their sessions after the grace."""
    for managed in processes:
        if managed.is_running:
            assert managed.process is not None
            managed.process.terminate()
    grace_s = decide_grace_s()  # may call Slurm while the processes stop
    give_up_at = time.monotonic() + grace_s
    while any(managed.is_running for managed in processes) and time.monotonic() < give_up_at:
        time.sleep(END_POLL_S)
    for managed in processes:
        managed.signal_session(signal.SIGKILL)
        if managed.process is not None:
            managed.process.wait()
        managed.kill_fork_server()
