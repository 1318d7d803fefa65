"""Foreground launcher's side of a supervisor: what `SlurmTask` is under `areal-hpc submit`."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from areal_hpc.jobs import starts, time_limit
from areal_hpc.jobs.node.topology import TaskPosition
from areal_hpc.jobs.task_processes import build_start_environment
from areal_hpc.rundir.allocation_note import LAUNCHER_HEARTBEAT_TIMEOUT_S
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE, LaunchFile, TaskExit, write_task_exit
from areal_hpc.rundir.lock import is_lock_held

log = logging.getLogger(__name__)

HEARTBEAT_POLL_S = 2.0
LAUNCHER_GONE = TaskExit(STOPPED_EXIT_CODE, reason="the launcher is gone")


class LocalTask:
    """A supervisor on the launcher's machine, or in a step of its allocation, perhaps elsewhere."""

    def __init__(self, launch: LaunchFile, position: TaskPosition) -> None:
        self._launch = launch
        self._position = position
        self._step = step = launch.step
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
        """A stop when the launcher is gone, or a later start of the job has begun.

        On this machine the kernel drops the launcher's lock however it died. Locks do not reach
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
        except FileNotFoundError:  # a launcher that ended took its note away: no beat
            beat = self._last_beat
        except OSError as error:  # the launcher cannot write either, where storage is away
            log.warning("shared storage does not respond: %s", error)
            self._last_beat_at = now
            return None
        if beat != self._last_beat:
            self._last_beat, self._last_beat_at = beat, now
        return LAUNCHER_GONE if now - self._last_beat_at >= LAUNCHER_HEARTBEAT_TIMEOUT_S else None

    def announce_stop(self, outcome: TaskExit) -> float:
        """Seconds that processes get to stop by themselves; where they save, those of a save too.

        Processes of a step read it from a note, which all tasks of the job write alike.
        """
        grace_s = self._launch.stop_grace_s
        if self._start is None:
            return grace_s
        try:
            if outcome.exit_code == STOPPED_EXIT_CODE:
                grace_s += time_limit.read_checkpoint_duration_s(self._launch.paths)
            if not self._is_superseded:
                note = starts.StopNote(outcome.reason, outcome.exit_code, grace_s)
                path = starts.get_stop_note_path(self._starts_dir, self._start)
                starts.write_stop_note(path, note)
        except OSError as error:
            log.warning("could not tell the processes how long they have: %s", error)
        return grace_s

    def conclude(self, outcome: TaskExit) -> TaskExit:
        """Tell the launcher, unless the files belong to a later start."""
        if self._step is not None:
            outcome = msgspec.structs.replace(outcome, incarnation=self._step.incarnation)
        if not self._is_superseded:
            write_task_exit(self._launch.paths, self._position.rank, outcome)
        return outcome
