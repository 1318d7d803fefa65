"""Foreground launcher's side of a supervisor: what `SlurmTask` is under `areal-hpc submit`.

The supervisor runs on the launcher's machine, or in a step of the launcher's allocation.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from areal_hpc.jobs import starts, time_limit
from areal_hpc.jobs.node.topology import TaskPosition
from areal_hpc.jobs.task_processes import build_start_environment
from areal_hpc.rundir.allocation_note import LAUNCHER_HEARTBEAT_TIMEOUT_S
from areal_hpc.rundir.jobs import (
    STOPPED_EXIT_CODE,
    AllocationStepStart,
    LaunchFile,
    TaskExit,
    write_task_exit,
)
from areal_hpc.rundir.lock import is_lock_held

log = logging.getLogger(__name__)

HEARTBEAT_POLL_S = 2.0
LAUNCHER_GONE_REASON = "the launcher is gone"


class LocalTask:
    """The launcher's side of a supervisor on this machine."""

    def __init__(self, launch: LaunchFile, position: TaskPosition) -> None:
        self._launch = launch
        self._position = position

    def begin(self) -> TaskExit | None:
        return None

    def build_environment(self) -> Mapping[str, str]:
        return {}

    def find_stop_reason(self, *, can_end_job: bool) -> TaskExit | None:
        """A stop when nobody holds the launcher's lock: the kernel drops it however it died."""
        lock = self._launch.launcher_lock
        if lock is None or is_lock_held(lock):
            return None
        return TaskExit(STOPPED_EXIT_CODE, reason=LAUNCHER_GONE_REASON)

    def announce_stop(self, outcome: TaskExit) -> float:
        return self._launch.stop_grace_s

    def conclude(self, outcome: TaskExit) -> TaskExit:
        write_task_exit(self._launch.paths, self._position.rank, outcome)
        return outcome


class AllocationStepTask:
    """The launcher's side of a supervisor in a step of an allocation, perhaps on another node."""

    def __init__(
        self, launch: LaunchFile, step: AllocationStepStart, position: TaskPosition
    ) -> None:
        self._launch = launch
        self._step = step
        self._position = position
        self._starts_dir = launch.paths.starts_dir
        self._start = starts.JobStart(step.start_number, step.incarnation, "")
        self._is_superseded = False
        self._last_beat = b""
        self._last_beat_at = self._next_look_at = time.monotonic()

    def begin(self) -> TaskExit | None:
        return None

    def build_environment(self) -> Mapping[str, str]:
        paths, step = self._launch.paths, self._step
        return build_start_environment(
            paths, step.interface, step.start_number, self._stop_note_path
        )

    @property
    def _stop_note_path(self) -> Path:
        return starts.get_stop_note_path(self._starts_dir, self._start)

    def find_stop_reason(self, *, can_end_job: bool) -> TaskExit | None:
        """A stop when a later start of the job has begun, or the launcher was silent for long.

        Locks do not reach other nodes on every file system, so they say nothing here.
        """
        now = time.monotonic()
        if now < self._next_look_at:
            return None
        self._next_look_at = now + HEARTBEAT_POLL_S
        try:
            if starts.is_superseded(self._starts_dir, self._start):
                self._is_superseded = True
                return TaskExit(STOPPED_EXIT_CODE, reason="superseded by a later start of this job")
            beat = Path(self._step.heartbeat_path).read_bytes()
        except FileNotFoundError:  # a launcher that ended took its note away: no beat
            beat = self._last_beat
        except OSError as error:  # the launcher cannot write either, where storage is away
            log.warning("shared storage does not respond: %s", error)
            self._last_beat_at = now
            return None
        if beat != self._last_beat:
            self._last_beat, self._last_beat_at = beat, now
        if now - self._last_beat_at < LAUNCHER_HEARTBEAT_TIMEOUT_S:
            return None
        return TaskExit(STOPPED_EXIT_CODE, reason=LAUNCHER_GONE_REASON)

    def announce_stop(self, outcome: TaskExit) -> float:
        """Seconds that processes get to stop by themselves; where they save, those of a save too.

        Processes read it from a note, which all tasks of the job write alike.
        """
        grace_s = self._launch.stop_grace_s
        try:
            if outcome.exit_code == STOPPED_EXIT_CODE:
                grace_s += time_limit.read_checkpoint_duration_s(self._launch.paths)
            if not self._is_superseded:
                note = starts.StopNote(outcome.reason, outcome.exit_code, grace_s)
                starts.write_stop_note(self._stop_note_path, note)
        except OSError as error:
            log.warning("could not tell the processes how long they have: %s", error)
        return grace_s

    def conclude(self, outcome: TaskExit) -> TaskExit:
        """Tell the launcher, unless the files belong to a later start."""
        outcome = msgspec.structs.replace(outcome, incarnation=self._step.incarnation)
        if not self._is_superseded:
            write_task_exit(self._launch.paths, self._position.rank, outcome)
        return outcome
