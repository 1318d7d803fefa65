"""Supervisor of one task: it starts, restarts and stops the task's processes.

No process outlives its supervisor: children die with it (kernel death signal), and each leads a
session of its own, so that stopping a child stops all of its descendants.

A supervisor works with a `SlurmTask` in a Slurm job, and with a `LocalTask` under a foreground
launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from areal_hpc.errors import ArealError, ClusterError, RecipeError, ShardError
from areal_hpc.jobs import starts
from areal_hpc.jobs.node import TaskPosition, detect_task_position
from areal_hpc.jobs.processes.process_setup import StopRequest, set_up_logging
from areal_hpc.jobs.processes.process_ties import die_with_parent
from areal_hpc.jobs.processes.stack_dumps import StackRequestWatch
from areal_hpc.jobs.restarts import (
    PERMANENT_EXIT_CODES,
    RankRestart,
    RankRestartNotes,
    RestartPolicy,
)
from areal_hpc.jobs.slurm_task import SlurmTask
from areal_hpc.jobs.task_processes import (
    ManagedProcess,
    ProcessStarter,
    build_start_environment,
    stop_processes,
)
from areal_hpc.rundir.files import StorageErrorTolerance, forbid_making, log_storage_errors
from areal_hpc.rundir.jobs import (
    IDLE_EXIT_CODE,
    LOST_RANK_EXIT_CODE,
    STOPPED_EXIT_CODE,
    LaunchFile,
    TaskExit,
    read_launch_file,
    read_task_exits,
    write_task_exit,
)
from areal_hpc.rundir.lock import LAUNCHER_HEARTBEAT_TIMEOUT_S, is_lock_held
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.wire.retry import Backoff

log = logging.getLogger(__name__)

HEARTBEAT_POLL_S = 2.0
LAUNCHER_GONE = TaskExit(STOPPED_EXIT_CODE, reason="the launcher is gone")
PROCESS_POLL_S = 0.1
RESTART_BACKOFF = Backoff(0.5, 10.0)
LOCAL_RANK_RESTART_POLL_S = 0.1
SLURM_RANK_RESTART_POLL_S = 2.0
"""Time between two looks for the death of another task's rank, while this task's rank works."""
EXIT_CODES_CAUSED_BY_OTHER_RANKS = (STOPPED_EXIT_CODE, LOST_RANK_EXIT_CODE)
"""Exit codes of a rank that left because another rank failed."""
VICTIM_RESTART_NOTE_TIMEOUT_S = 10.0
ERROR_RESTART_NOTE_TIMEOUT_S = 1.0
SIGNAL_EXIT_CODE_BASE = 128
"""Base of the exit codes of signals."""
FINAL_RANK_EXIT_CODES = (
    STOPPED_EXIT_CODE,
    RecipeError.exit_code,
    ShardError.exit_code,
    ArealError.exit_code,
)
"""Exit codes of a rank that would end the same way after a restart within the job."""


def run_task(launch_path: str) -> None:
    """Run one task of a job to its end. submitit calls it, and this module as a program.

    Exits with 0 when the job is complete, with the failed process's code otherwise. The outcome is
    also written to the job's folder, because not every launcher sees exit codes.
    """
    launch = read_launch_file(Path(launch_path))
    forbid_making(launch.run.root)
    position = detect_task_position(os.environ)
    os.umask(launch.umask)  # Slurm passes on that of the submitting shell
    if launch.slurm is None and launch.step is None and os.getpid() != os.getsid(0):
        os.setsid()  # only the launcher handles a Ctrl-C in the terminal
    die_with_parent(signal.SIGTERM)
    set_up_logging()
    stop = StopRequest.install()
    task: SlurmTask | LocalTask = LocalTask(launch, position)
    if launch.slurm is not None:
        events = EventLog(Path(launch.events), launch.job.name)
        task = SlurmTask(launch, launch.slurm, position, events)
    outcome = task.conclude(_Supervisor(launch, position, stop, task).run())
    if outcome.exit_code:
        sys.exit(outcome.exit_code)


def get_note_timeout_s(exit_code: int) -> float:
    """Return the time for which a supervisor waits for the note of a rank that died earlier.

    Only a signal is certain not to be a consequence of another rank's death. Some exit codes are
    certain to be one.
    """
    if exit_code in EXIT_CODES_CAUSED_BY_OTHER_RANKS:
        return VICTIM_RESTART_NOTE_TIMEOUT_S
    return 0.0 if exit_code > SIGNAL_EXIT_CODE_BASE else ERROR_RESTART_NOTE_TIMEOUT_S


class _Supervisor:
    def __init__(
        self,
        launch: LaunchFile,
        position: TaskPosition,
        stop: StopRequest,
        task: SlurmTask | LocalTask,
    ) -> None:
        self._launch = launch
        self._position = position
        self._stop = stop
        self._task = task
        self._events = EventLog(Path(launch.events), launch.job.name)
        self._starter = ProcessStarter(launch, position, task.build_environment)
        self._notes = RankRestartNotes(
            launch.paths.rank_restarts_dir / (task.incarnation or "local"),
            SLURM_RANK_RESTART_POLL_S if task.incarnation else LOCAL_RANK_RESTART_POLL_S,
        )
        self._stack_requests = StackRequestWatch(launch.paths.stack_request)
        self._children: list[ManagedProcess] = []

    def run(self) -> TaskExit:
        outcome = TaskExit(STOPPED_EXIT_CODE, reason="the supervisor failed")
        try:
            outcome = self._run_processes()
        except ArealError as error:
            outcome = TaskExit(error.exit_code, "supervisor", str(error))
        except OSError as error:  # before the first process starts; later errors are tolerated
            problem = ClusterError(
                f"the task could not start: {error.strerror or error}",
                key=str(error.filename or self._launch.paths.root),
                hint="check free space, quota and permissions of the run directory",
            )
            outcome = TaskExit(problem.exit_code, "supervisor", str(problem))
        finally:
            stop_processes(self._children, lambda: self._task.announce_stop(outcome))
        return outcome

    def _run_processes(self) -> TaskExit:
        if (refusal := self._task.begin()) is not None:
            return refusal
        self._children += self._starter.prepare_processes()
        storage = StorageErrorTolerance()
        outcome: TaskExit | None = None
        while outcome is None:
            with storage.tolerate():
                outcome = self._poll_processes()
            if outcome is None:
                self._stop.wait(PROCESS_POLL_S)
        return outcome

    def _poll_processes(self) -> TaskExit | None:
        if self._stop.requested:
            return TaskExit(STOPPED_EXIT_CODE, reason="stopped by a signal")
        can_end_job = any(child.spec.ends_job for child in self._children)
        if (outcome := self._task.find_stop_reason(can_end_job=can_end_job)) is not None:
            return outcome
        if self._stack_requests.has_new_request():
            for child in self._children:
                child.request_stacks()
        for child in list(self._children):  # a child that is done is removed
            if (outcome := self._poll_process(child)) is not None:
                return outcome
        return None

    def _poll_process(self, child: ManagedProcess) -> TaskExit | None:
        if child.spec.is_rank:
            self._follow_rank_restart(child)
        if child.process is None:
            if time.monotonic() >= child.not_before:
                self._starter.start(child)
            return None
        code = child.process.poll()
        return None if code is None else self._on_process_exit(child, code)

    def _follow_rank_restart(self, child: ManagedProcess) -> None:
        note: RankRestart | None = None
        with log_storage_errors():
            note = self._notes.read_next_restart(is_urgent=not child.is_running)
        if note is None:
            return
        log.warning(
            "%s of task %d ended with exit code %d: all start again",
            *(child.spec.name, note.task, note.exit_code),
        )
        if child.is_running:
            child.signal_session(signal.SIGKILL)
        child.is_killed_for_restart = child.process is not None
        child.crashes_without_progress = note.failures
        pause_s = RESTART_BACKOFF.get_pause_s(note.failures - 2) if note.failures > 1 else 0.0
        child.not_before = time.monotonic() + pause_s

    def _on_process_exit(self, child: ManagedProcess, code: int) -> TaskExit | None:
        spec = child.spec
        if child.ended_at is None:
            child.ended_at = time.monotonic()
            child.signal_session(signal.SIGKILL)  # kills what it left behind
        if code == 0:
            if spec.ends_job:
                return TaskExit(0, spec.name)
            self._children.remove(child)
            child.kill_fork_server()
            return None
        if child.is_killed_for_restart:
            child.process = None
            return None
        code = 128 - code if code < 0 else code
        if code == IDLE_EXIT_CODE:
            return TaskExit(code, spec.name, f"{spec.name} was idle for too long")
        if spec.is_rank and self._launch.job.tasks > 1:
            if code in EXIT_CODES_CAUSED_BY_OTHER_RANKS and self._any_other_task_ended():
                return TaskExit(STOPPED_EXIT_CODE, spec.name, "the rank of another task failed")
            if time.monotonic() - child.ended_at < get_note_timeout_s(code):
                return None  # another task may still announce that its rank died earlier
        if code == LOST_RANK_EXIT_CODE:
            code = ClusterError.exit_code
        return self._on_process_crash(child, code)

    def _on_process_crash(self, child: ManagedProcess, code: int) -> TaskExit | None:
        spec, now = child.spec, time.monotonic()
        policy = RestartPolicy(spec.restarts)
        made_progress = now - child.started_at >= policy.healthy_s or child.made_progress()
        failures = policy.count_failures(
            child.crashes_without_progress, made_progress=made_progress
        )
        decision = policy.decide([code], failures)
        if spec.is_rank and (code in FINAL_RANK_EXIT_CODES or self._any_other_task_ended()):
            decision = "fail"
        if spec.is_rank and decision == "restart":
            try:
                note = RankRestart(self._position.rank, code, failures)
                if not self._notes.announce_restart(note):
                    return None  # the next look follows another task's note
            except OSError as error:
                log.error("could not notify the other tasks: %s", error)
                decision = "fail"
        log.error("%s ended with exit code %d", spec.name, code)
        self._events.record("process_exited", process=spec.name, exit_code=code, start=child.starts)
        if decision == "fail":
            return TaskExit(
                code,
                spec.name,
                child.read_last_words(),
                str(child.log_path),
                says_why=code in PERMANENT_EXIT_CODES and child.has_written_error_file,
            )
        if spec.is_rank:
            self._events.record("ranks_restarted", process=spec.name, failures=failures)
        else:
            child.crashes_without_progress, child.process = failures, None
            child.not_before = now + RESTART_BACKOFF.get_pause_s(failures - 1)
        return None

    def _any_other_task_ended(self) -> bool:
        exits = read_task_exits(self._launch.paths)
        return any(
            rank != self._position.rank and task_exit.incarnation == self._task.incarnation
            for rank, task_exit in exits.items()
        )


class LocalTask:
    """Task on the launcher's machine, or in a step of its allocation on any node."""

    def __init__(self, launch: LaunchFile, position: TaskPosition) -> None:
        self._launch = launch
        self._position = position
        self._step = step = launch.step
        self.incarnation = step.incarnation if step else ""
        """Start of the job, as in `TaskExit`."""
        self._starts_dir = launch.paths.starts_dir
        self._start = starts.JobStart(step.start_number, step.incarnation, "") if step else None
        self._is_superseded = False
        self._last_beat = b""
        self._last_beat_at = self._next_look_at = time.monotonic()

    def begin(self) -> TaskExit | None:
        return None

    def build_environment(self) -> Mapping[str, str]:
        if self._step is None or self._start is None:
            return {}
        note = starts.get_stop_note_path(self._starts_dir, self._start)
        return build_start_environment(
            self._launch.paths, self._step.interface, self._step.start_number, note
        )

    def find_stop_reason(self, *, can_end_job: bool) -> TaskExit | None:
        """Return an exit if the launcher is gone, or a later start of the job has begun.

        On this machine the kernel releases the launcher's lock however it died. Locks do not reach
        other nodes on every file system, so a step follows a heartbeat.
        """
        if self._step is None or self._start is None:
            lock = self._launch.launcher_lock
            return None if lock is None or is_lock_held(lock) else LAUNCHER_GONE
        now = time.monotonic()
        if now < self._next_look_at:
            return None
        self._next_look_at = now + HEARTBEAT_POLL_S
        try:
            if starts.is_superseded(self._starts_dir, self._start):
                self._is_superseded = True
                return TaskExit(STOPPED_EXIT_CODE, reason="superseded by a later start of this job")
            beat = Path(self._step.heartbeat_path).read_bytes()
        except FileNotFoundError:  # a launcher that ended removed its note
            beat = self._last_beat
        except OSError as error:  # the launcher cannot write either during an outage
            log.warning("shared storage does not respond: %s", error)
            self._last_beat_at = now
            return None
        if beat != self._last_beat:
            self._last_beat, self._last_beat_at = beat, now
        return LAUNCHER_GONE if now - self._last_beat_at >= LAUNCHER_HEARTBEAT_TIMEOUT_S else None

    def announce_stop(self, outcome: TaskExit) -> float:
        """Return the grace of processes in seconds, with that of a save if they are to save.

        Processes of a step read it from a note, which all tasks of the job write alike.
        """
        grace_s = self._launch.stop_grace_s
        if self._start is None:
            return grace_s
        try:
            if outcome.exit_code == STOPPED_EXIT_CODE:
                grace_s += starts.read_checkpoint_duration_s(self._launch.paths)
            if not self._is_superseded:
                note = starts.StopNote(outcome.reason, outcome.exit_code, grace_s)
                path = starts.get_stop_note_path(self._starts_dir, self._start)
                starts.write_stop_note(path, note)
        except OSError as error:
            log.warning("the stop note could not be written: %s", error)
        return grace_s

    def conclude(self, outcome: TaskExit) -> TaskExit:
        """Record the exit for the launcher unless the files belong to a later start."""
        outcome = msgspec.structs.replace(outcome, incarnation=self.incarnation)
        if not self._is_superseded:
            write_task_exit(self._launch.paths, self._position.rank, outcome)
        return outcome


if __name__ == "__main__":
    run_task(sys.argv[1])
