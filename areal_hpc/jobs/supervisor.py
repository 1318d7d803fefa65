"""Supervisor of one task: start, restart and stop its processes.

Nothing it starts outlives it: children die with it (kernel death signal), and each runs in a
session of its own, so that stopping a child stops whatever that child started.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.errors import ArealError, RecipeError
from areal_hpc.jobs import gpus
from areal_hpc.jobs.die_with_parent import die_with_parent
from areal_hpc.jobs.environment import set_up_logging
from areal_hpc.jobs.restart_policy import RestartPolicy
from areal_hpc.jobs.signals import StopRequest
from areal_hpc.jobs.slurm_task import SlurmTask
from areal_hpc.jobs.topology import TaskPosition, detect_task_position, get_slurm_restart_count
from areal_hpc.rundir.events import EventLog
from areal_hpc.rundir.jobs import (
    IDLE_EXIT_CODE,
    STOPPED_EXIT_CODE,
    LaunchFile,
    ProcessSpec,
    TaskExit,
    write_task_exit,
)
from areal_hpc.rundir.lock import is_lock_held
from areal_hpc.rundir.paths import format_restart_dir, get_process_error_path
from areal_hpc.wire.backoff import Backoff

log = logging.getLogger(__name__)
POLL_S = 0.1
BACKOFF = Backoff(0.5, 10.0)
PROCESS_MAIN = "areal_hpc.jobs.process_main"


def run_task(launch_path: str) -> None:
    """Run one task of a job to its end. This is the function that submitit calls.

    Exits with 0 when the job is complete, with the failed process's code otherwise. The
    outcome is also left in the job's folder, because not every launcher sees exit codes.
    """
    launch = msgspec.json.decode(Path(launch_path).read_bytes(), type=LaunchFile)
    position = detect_task_position(os.environ)
    if launch.slurm is None and os.getpid() != os.getsid(0):
        os.setsid()  # a Ctrl-C in the terminal is the launcher's to handle, not ours
    die_with_parent(signal.SIGTERM)
    set_up_logging()
    stop = StopRequest.install()
    events = EventLog(Path(launch.events), launch.job.name)
    task: SlurmTask | LocalTask
    if launch.slurm is not None:
        task = SlurmTask(launch, launch.slurm, position, events)
    else:
        task = LocalTask(launch, position)
    outcome = task.finish(_Supervisor(launch, position, stop, task, events).run())
    if outcome.exit_code:
        sys.exit(outcome.exit_code)


def build_visible_gpus_variable(spec: ProcessSpec, launch: LaunchFile, rank: int) -> dict[str, str]:
    """The variable that shows a process its task's GPUs and no others; nothing under Slurm.

    submitit's local executor hides every GPU of the machine from the jobs that it starts.
    """
    if launch.gpus is None:
        return {}
    return {gpus.VISIBLE_DEVICES_VARIABLE: ",".join(launch.gpus[rank] if spec.uses_gpus else ())}


class LocalTask:
    """The launcher's side of a supervisor on this machine: what `SlurmTask` is under Slurm."""

    def __init__(self, launch: LaunchFile, position: TaskPosition) -> None:
        self._launch = launch
        self._position = position

    def prepare_start(self) -> TaskExit | None:
        """Nothing stands in the way."""
        return None

    def build_environment(self) -> Mapping[str, str]:
        """Nothing to know."""
        return {}

    def find_stop_reason(self, *, is_leading: bool) -> TaskExit | None:
        """A stop when nobody holds the launcher's lock: the kernel drops it however it died."""
        lock = self._launch.launcher_lock
        if lock is None or is_lock_held(lock):
            return None
        return TaskExit(STOPPED_EXIT_CODE, reason="the launcher is gone")

    def decide_stop_grace_s(self, outcome: TaskExit) -> float:
        """Seconds that processes get to stop by themselves."""
        return self._launch.stop_grace_s

    def finish(self, outcome: TaskExit) -> TaskExit:
        """Tell the launcher."""
        write_task_exit(self._launch.paths, self._position.rank, outcome)
        return outcome


@dataclass(slots=True)
class _ManagedProcess:
    """A started process, how often it has been started, and how often it crashed lately."""

    spec: ProcessSpec
    log_path: Path
    config_path: Path
    starts: int = 0
    started_at: float = 0.0
    crashes: int = 0
    not_before: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    def start(self, python: str, environ: Mapping[str, str]) -> None:
        self.starts += 1
        self.started_at = time.monotonic()
        get_process_error_path(self.config_path).unlink(missing_ok=True)
        with self.log_path.open("ab") as log_file:
            self.process = subprocess.Popen(
                [python, "-m", PROCESS_MAIN, self.spec.entry, str(self.config_path)],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal_group(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def read_exit_reason(self) -> str:
        """The error the process left, or the end of its log."""
        left = get_process_error_path(self.config_path)
        if left.exists():
            return left.read_text()
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-12:])


class _Supervisor:
    def __init__(
        self,
        launch: LaunchFile,
        position: TaskPosition,
        stop: StopRequest,
        task: SlurmTask | LocalTask,
        events: EventLog,
    ) -> None:
        self._launch = launch
        self._position = position
        self._stop = stop
        self._task = task
        self._events = events
        self._log_dir = Path(launch.log_dir) / launch.job.name
        if launch.slurm is not None:
            self._log_dir /= format_restart_dir(get_slurm_restart_count(os.environ))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._surroundings: Mapping[str, str] = {}
        self._children = [
            self._prepare_process(spec)
            for spec in launch.job.processes
            if spec.tasks in ("all", "first" if position.is_first else "others")
        ]

    def _prepare_process(self, spec: ProcessSpec) -> _ManagedProcess:
        suffix = f"-{self._position.rank}" if self._launch.job.tasks > 1 else ""
        config_path = self._launch.paths.process_config(f"{spec.name}{suffix}")
        config_path.write_bytes(msgspec.json.encode(spec.config))
        log_path = self._log_dir / f"{spec.name}{suffix}.log"
        if self._launch.slurm is not None:
            node, job_id = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"]
            restart = get_slurm_restart_count(os.environ)
            with log_path.open("a") as stream:
                stream.write(f"node {node} job {job_id} restart {restart}\n")
        return _ManagedProcess(spec, log_path, config_path)

    def run(self) -> TaskExit:
        """Run the task's processes until it is decided how the task ends; none is left then."""
        outcome = TaskExit(STOPPED_EXIT_CODE, reason="the supervisor failed")
        try:
            outcome = self._run_processes()
        except ArealError as error:
            outcome = TaskExit(error.exit_code, "supervisor", str(error))
        finally:
            self._stop_all(outcome)
        return outcome

    def _run_processes(self) -> TaskExit:
        if (refusal := self._task.prepare_start()) is not None:
            return refusal
        self._surroundings = self._task.build_environment()
        for child in self._children:
            self._start_process(child)
        while (outcome := self._poll_processes()) is None:
            self._stop.wait(POLL_S)
        return outcome

    def _start_process(self, child: _ManagedProcess) -> None:
        spec = child.spec
        python = self._launch.pythons[spec.role]
        if shutil.which(python) is None:
            raise RecipeError(
                f"no Python interpreter for role {spec.role}: {python}",
                key=f"cluster.{spec.role}.python",
                hint="make setup, or name the interpreter in the recipe",
            )
        position = self._position
        environ = {
            **os.environ,
            **self._surroundings,
            **build_visible_gpus_variable(spec, self._launch, position.rank),
            **self._launch.variables.get(spec.role, {}),
            "AREAL_HPC_RANK": str(position.rank),
            "AREAL_HPC_NUM_TASKS": str(position.num_tasks),
            "AREAL_HPC_LOCAL_RANK": str(position.local_rank),
            "AREAL_HPC_NODE_RANK": str(position.node_rank),
            "AREAL_HPC_LOG_DIR": str(self._log_dir),
            "AREAL_HPC_SUPERVISOR_PID": str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        child.start(python, environ)
        log.info("started %s (start %d)", spec.name, child.starts)

    def _poll_processes(self) -> TaskExit | None:
        """Look after every child once; the job's outcome when it is decided."""
        if self._stop.requested:
            return TaskExit(STOPPED_EXIT_CODE, reason="stopped by a signal")
        is_leading = any(child.spec.ends_job for child in self._children)
        if (outcome := self._task.find_stop_reason(is_leading=is_leading)) is not None:
            return outcome
        for child in list(self._children):  # one that has done its work is removed
            if child.process is None:
                if time.monotonic() >= child.not_before:
                    self._start_process(child)
            elif (code := child.process.poll()) is not None:
                outcome = self._on_exit(child, code)
                if outcome is not None:
                    return outcome
        return None

    def _on_exit(self, child: _ManagedProcess, code: int) -> TaskExit | None:
        """Decide what the end of a process means for the job."""
        spec = child.spec
        child.signal_group(signal.SIGKILL)  # whatever it left behind
        if code == 0:
            if spec.ends_job:
                return TaskExit(0, spec.name)
            self._children.remove(child)
            return None
        code = 128 - code if code < 0 else code
        if code == IDLE_EXIT_CODE:
            return TaskExit(code, spec.name, f"{spec.name} was idle for too long")
        log.error("%s ended with exit code %d", spec.name, code)
        self._events.record("process_exited", process=spec.name, exit_code=code, start=child.starts)
        now = time.monotonic()
        policy = RestartPolicy(spec.restarts)
        made_progress = now - child.started_at >= policy.healthy_s
        child.crashes = policy.count_failures(child.crashes, made_progress=made_progress)
        if policy.decide([code], child.crashes) == "fail":
            return TaskExit(code, spec.name, child.read_exit_reason(), str(child.log_path))
        child.process = None
        child.not_before = now + BACKOFF.get_pause_s(child.crashes - 1)
        return None

    def _stop_all(self, outcome: TaskExit) -> None:
        """SIGTERM to every process, SIGKILL to whole sessions after the grace."""
        for child in self._children:
            if child.running:
                assert child.process is not None
                child.process.terminate()
        grace_s = self._task.decide_stop_grace_s(outcome)
        give_up_at = time.monotonic() + grace_s
        while any(child.running for child in self._children) and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        for child in self._children:
            child.signal_group(signal.SIGKILL)
            if child.process is not None:
                child.process.wait()
