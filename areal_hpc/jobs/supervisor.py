"""Supervisor of one task: start, restart and stop its processes.

Nothing it starts outlives it: children die with it (kernel death signal), and each runs in a
session of its own, so that stopping a child stops whatever that child started.
"""

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from areal_hpc.errors import ArealError, ClusterError, RecipeError, ShardError
from areal_hpc.jobs import gpus
from areal_hpc.jobs.environment import set_up_logging
from areal_hpc.jobs.processes.die_with_parent import die_with_parent
from areal_hpc.jobs.processes.managed_process import ManagedProcess
from areal_hpc.jobs.processes.rank_restarts import RankRestart, RankRestartNotes
from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.jobs.restart_policy import PERMANENT_EXIT_CODES, RestartPolicy
from areal_hpc.jobs.slurm_task import SlurmTask
from areal_hpc.jobs.topology import TaskPosition, detect_task_position, get_slurm_restart_count
from areal_hpc.recipe.private_values import read_role_variables
from areal_hpc.rundir.atomic import write_atomic_private
from areal_hpc.rundir.events import EventLog
from areal_hpc.rundir.jobs import (
    IDLE_EXIT_CODE,
    LOST_PEER_EXIT_CODE,
    STOPPED_EXIT_CODE,
    LaunchFile,
    ProcessSpec,
    TaskExit,
    read_task_exits,
    write_task_exit,
)
from areal_hpc.rundir.lock import is_lock_held
from areal_hpc.rundir.paths import ROLES, format_restart_dir
from areal_hpc.rundir.storage_errors import StorageErrorTolerance
from areal_hpc.slurm import scontrol
from areal_hpc.wire.backoff import Backoff

log = logging.getLogger(__name__)
PROCESS_POLL_S = 0.1
RESTART_BACKOFF = Backoff(0.5, 10.0)
LOCAL_RANK_RESTART_POLL_S = 0.1
SLURM_RANK_RESTART_POLL_S = 2.0
"""Between two looks for the death of another task's rank, while this one's works."""
VICTIM_EXIT_CODES = (STOPPED_EXIT_CODE, LOST_PEER_EXIT_CODE)
"""Of a rank that left because another one failed."""
VICTIM_RESTART_NOTE_TIMEOUT_S = 10.0
ERROR_RESTART_NOTE_TIMEOUT_S = 1.0
SIGNAL_EXIT_CODE_BASE = 128
"""Exit codes above this are those of signals."""
FINAL_EXIT_CODES = (
    STOPPED_EXIT_CODE,
    RecipeError.exit_code,
    ShardError.exit_code,
    ArealError.exit_code,
)
"""Of a rank that would end so again: starting all again within the job does not help."""


def run_task(launch_path: str) -> None:
    """Run one task of a job to its end. This is the function that submitit calls.

    Exits with 0 when the job is complete, with the failed process's code otherwise. The
    outcome is also left in the job's folder, because not every launcher sees exit codes.
    """
    launch = msgspec.json.decode(Path(launch_path).read_bytes(), type=LaunchFile)
    position = detect_task_position(os.environ)
    os.umask(launch.umask)  # Slurm hands on that of whoever submitted
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


def get_incarnation(launch: LaunchFile) -> str:
    """Which start of the job this is, as `TaskExit` says it."""
    if launch.slurm is None:
        return ""
    return f"{scontrol.get_own_job_id(os.environ)}.{get_slurm_restart_count(os.environ)}"


def get_restart_note_timeout_s(exit_code: int) -> float:
    """Time that a rank's supervisor waits for the note of a rank that died before it. Pure.

    Nothing but a signal needs no other rank's death to come about; some codes say that it did.
    """
    if exit_code in VICTIM_EXIT_CODES:
        return VICTIM_RESTART_NOTE_TIMEOUT_S
    return 0.0 if exit_code > SIGNAL_EXIT_CODE_BASE else ERROR_RESTART_NOTE_TIMEOUT_S


class LocalTask:
    """The launcher's side of a supervisor on this machine: what `SlurmTask` is under Slurm."""

    def __init__(self, launch: LaunchFile, position: TaskPosition) -> None:
        self._launch = launch
        self._position = position

    def join_start(self) -> TaskExit | None:
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
        self._recipe_variables: Mapping[str, Mapping[str, str]] = {}
        self._incarnation = get_incarnation(launch)
        self._notes = RankRestartNotes(
            launch.paths.rank_restarts_dir / (self._incarnation or "local"),
            LOCAL_RANK_RESTART_POLL_S if launch.slurm is None else SLURM_RANK_RESTART_POLL_S,
        )
        self._children = [
            self._prepare_process(spec)
            for spec in launch.job.processes
            if spec.tasks in ("all", "first" if position.is_first else "others")
        ]

    def _prepare_process(self, spec: ProcessSpec) -> ManagedProcess:
        suffix = f"-{self._position.rank}" if self._launch.job.tasks > 1 else ""
        config_path = self._launch.paths.process_config(f"{spec.name}{suffix}")
        # Agent arguments may hold keys of other services.
        write_atomic_private(config_path, msgspec.json.encode(spec.config))
        log_path = self._log_dir / f"{spec.name}{suffix}.log"
        if self._launch.slurm is not None:
            node, job_id = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"]
            restart = get_slurm_restart_count(os.environ)
            with log_path.open("a") as stream:
                stream.write(f"node {node} job {job_id} restart {restart}\n")
        return ManagedProcess(spec, log_path, config_path)

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
        if (refusal := self._task.join_start()) is not None:
            return refusal
        self._surroundings = self._task.build_environment()
        if self._launch.recipe:
            path = Path(self._launch.recipe)
            self._recipe_variables = {role: read_role_variables(path, role) for role in ROLES}
        for child in self._children:
            self._start_process(child)
        storage = StorageErrorTolerance()
        outcome: TaskExit | None = None
        while outcome is None:
            with storage.tolerate():
                outcome = self._poll_processes()
            if outcome is None:
                self._stop.wait(PROCESS_POLL_S)
        return outcome

    def _start_process(self, child: ManagedProcess) -> None:
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
            **self._recipe_variables.get(spec.role, {}),
            "AREAL_HPC_RANK": str(position.rank),
            "AREAL_HPC_NUM_TASKS": str(position.num_tasks),
            "AREAL_HPC_LOCAL_RANK": str(position.local_rank),
            "AREAL_HPC_NODE_RANK": str(position.node_rank),
            "AREAL_HPC_LOG_DIR": str(self._log_dir),
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
            if (outcome := self._poll_process(child)) is not None:
                return outcome
        return None

    def _poll_process(self, child: ManagedProcess) -> TaskExit | None:
        if child.spec.is_rank:
            self._follow_rank_restart(child)
        if child.process is None:
            if time.monotonic() >= child.not_before:
                self._start_process(child)
            return None
        code = child.process.poll()
        return None if code is None else self._on_exit(child, code)

    def _follow_rank_restart(self, child: ManagedProcess) -> None:
        """Kill the rank if all ranks start again: nothing of it is worth a stop's grace."""
        try:
            note = self._notes.read_next(is_urgent=not child.is_running)
        except OSError as error:  # a stale handle, a server that fails over: the next look may do
            log.warning("shared storage does not respond: %s", error)
            return
        if note is None:
            return
        log.warning(
            "%s of task %d ended with exit code %d: all start again",
            *(child.spec.name, note.task, note.exit_code),
        )
        if child.is_running:
            child.signal_session(signal.SIGKILL)
        child.is_doomed = child.process is not None
        child.crashes = note.failures
        pause_s = RESTART_BACKOFF.get_pause_s(note.failures - 2) if note.failures > 1 else 0.0
        child.not_before = time.monotonic() + pause_s

    def _on_exit(self, child: ManagedProcess, code: int) -> TaskExit | None:
        """Decide what the end of a process means for the job."""
        spec = child.spec
        if child.ended_at is None:
            child.ended_at = time.monotonic()
            child.signal_session(signal.SIGKILL)  # whatever it left behind
        if code == 0:
            if spec.ends_job:
                return TaskExit(0, spec.name)
            self._children.remove(child)
            child.close()
            return None
        if child.is_doomed:
            child.process = None
            return None
        code = 128 - code if code < 0 else code
        if code == IDLE_EXIT_CODE:
            return TaskExit(code, spec.name, f"{spec.name} was idle for too long")
        if spec.is_rank and self._launch.job.tasks > 1:
            if code in VICTIM_EXIT_CODES and self._any_other_task_ended():
                return TaskExit(STOPPED_EXIT_CODE, spec.name, "the rank of another task failed")
            if time.monotonic() - child.ended_at < get_restart_note_timeout_s(code):
                return None  # another task may be about to say that its rank died before this one
        if code == LOST_PEER_EXIT_CODE:
            code = ClusterError.exit_code
        return self._on_crash(child, code)

    def _on_crash(self, child: ManagedProcess, code: int) -> TaskExit | None:
        """Decide what the end of a process that no other one brought about means for the job."""
        spec, now = child.spec, time.monotonic()
        policy = RestartPolicy(spec.restarts)
        made_progress = now - child.started_at >= policy.healthy_s or child.made_progress()
        failures = policy.count_failures(child.crashes, made_progress=made_progress)
        decision = policy.decide([code], failures)
        if spec.is_rank and (code in FINAL_EXIT_CODES or self._any_other_task_ended()):
            decision = "fail"
        if spec.is_rank and decision == "restart":
            try:
                note = RankRestart(self._position.rank, code, failures)
                if not self._notes.claim_next(note):
                    return None  # another task was first: the next look follows its note
            except OSError as error:
                log.error("could not notify the other tasks: %s", error)
                decision = "fail"
        log.error("%s ended with exit code %d", spec.name, code)
        self._events.record("process_exited", process=spec.name, exit_code=code, start=child.starts)
        if decision == "fail":
            return TaskExit(
                code,
                spec.name,
                child.read_error_or_log_tail(),
                str(child.log_path),
                says_why=code in PERMANENT_EXIT_CODES and child.has_left_error,
            )
        if spec.is_rank:
            self._events.record("ranks_restarted", process=spec.name, failures=failures)
        else:
            child.crashes, child.process = failures, None
            child.not_before = now + RESTART_BACKOFF.get_pause_s(failures - 1)
        return None

    def _any_other_task_ended(self) -> bool:
        """True if another task of this start of the job has ended: its rank would be missing."""
        exits = read_task_exits(self._launch.paths)
        return any(
            rank != self._position.rank and one.incarnation == self._incarnation
            for rank, one in exits.items()
        )

    def _stop_all(self, outcome: TaskExit) -> None:
        """SIGTERM to every process, SIGKILL to whole sessions after the grace."""
        for child in self._children:
            if child.is_running:
                assert child.process is not None
                child.process.terminate()
        grace_s = self._task.decide_stop_grace_s(outcome)
        give_up_at = time.monotonic() + grace_s
        while any(child.is_running for child in self._children) and time.monotonic() < give_up_at:
            time.sleep(PROCESS_POLL_S)
        for child in self._children:
            child.signal_session(signal.SIGKILL)
            if child.process is not None:
                child.process.wait()
            child.close()
