"""Event log of a run, `events.jsonl`: one line per event, with its time and role."""

import logging
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from areal_hpc.rundir.jsonl import (
    LineFollower,
    append_line,
    decode_readable_records,
    read_readable_records,
    read_tail_lines,
)

log = logging.getLogger(__name__)

LAUNCHER_ROLE = "launcher"
"""Role of a foreground launcher's events."""
LAUNCHER_ENDED_EVENT = "launcher_ended"
"""A launcher's last event, unless SIGKILL ended it; `signal` names the signal, if any."""
RECENT_BYTES = 1 << 20
"""Bytes at the end of the log in which recent events are sought."""


NO_CELL_EVENT, CELL_FOUND_EVENT = "no_cell", "cell_found"
"""The trainer has waited for a cell for a while; a cell is there again."""
RANKS_HANG_EVENT = "ranks_hang"
"""Ranks of the trainer make no progress; `ranks` names each with its position and duration."""
SUBMISSION_REFUSED_EVENT = "submission_refused"
"""Slurm refused a job."""


class EventLog:
    """Writer of the append-only `events.jsonl`."""

    def __init__(self, path: Path, role: str) -> None:
        self._path = path
        self._role = role

    def record(self, event: str, **event_fields: Any) -> None:
        """Record an event that happened now; log it instead if the storage refuses it."""
        self._emit_line(
            {"time": round(time.time(), 3), "role": self._role, "event": event, **event_fields}
        )

    def _emit_line(self, line: dict[str, Any]) -> None:
        try:
            append_line(self._path, line)
        except OSError as error:
            log.error("the event %s was not recorded: %s", line, error)


class BackgroundEventLog(EventLog):
    """Event log whose thread does the writing, for loops that must not wait for shared storage."""

    def __init__(self, path: Path, role: str) -> None:
        super().__init__(path, role)
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_queued_lines, name="events", daemon=True)
        self._writer.start()

    def close(self, timeout_s: float = 1.0) -> None:
        self._lines.put(None)
        self._writer.join(timeout_s)

    def _emit_line(self, line: dict[str, Any]) -> None:
        self._lines.put(line)

    def _write_queued_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            super()._emit_line(line)


def read_recent_events(path: Path) -> list[dict[str, Any]]:
    """Read the events at the end of the log, oldest first; none if there is no log."""
    try:
        content = read_tail_lines(path, RECENT_BYTES)
    except FileNotFoundError:
        return []
    return _select_events(decode_readable_records(content, dict[str, Any], f"the end of {path},"))


def read_all_events(path: Path) -> list[dict[str, Any]]:
    return _select_events(read_readable_records(path))


class EventFollower:
    """Reader of events that are appended to a log from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = LineFollower(path, from_end=True, max_bytes=RECENT_BYTES)

    def read_new_events(self) -> list[dict[str, Any]]:
        """Read the events since the last look, oldest first; none if the storage has an error."""
        try:
            content = self._lines.read_new_lines()
        except OSError:
            return []
        return _select_events(
            decode_readable_records(content, dict[str, Any], f"a part of {self._path},")
        )


def _select_events(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": "", **row}
        for row in rows
        if isinstance(row.get("event"), str)
        and isinstance(row.get("role", ""), str)
        and isinstance(row.get("time"), int | float)
    ]
