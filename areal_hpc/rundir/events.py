"""Event log of a run, `events.jsonl`: what happened, when, to which service."""

import logging
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from areal_hpc.rundir.jsonl import append_line, decode_lines, read_tail

log = logging.getLogger(__name__)

RECENT_BYTES = 1 << 20
"""The end of the log that is read, for those who look for what happened lately."""


NO_CELL_EVENT, CELL_FOUND_EVENT = "no_cell", "cell_found"
"""The trainer has waited for any cell for a while, and waits no more."""
SUBMISSION_REFUSED_EVENT = "submission_refused"
"""Slurm did not take a job."""


class EventLog:
    """Append-only `events.jsonl`: what happened, when, to which service."""

    def __init__(self, path: Path, role: str) -> None:
        self._path = path
        self._role = role

    def record(self, event: str, **facts: Any) -> None:
        """Note that `event` happened now.

        Nothing ends for want of an event: on a full or silent disk it is in the process's log.
        """
        self._emit_line(
            {"time": round(time.time(), 3), "role": self._role, "event": event, **facts}
        )

    def _emit_line(self, line: dict[str, Any]) -> None:
        try:
            append_line(self._path, line)
        except OSError as error:
            log.error("the event %s was not recorded: %s", line, error)


class BackgroundEventLog(EventLog):
    """Event log for a loop that must not wait for shared storage: a thread writes."""

    def __init__(self, path: Path, role: str) -> None:
        super().__init__(path, role)
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_queued_lines, name="events", daemon=True)
        self._writer.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is left, for at most so long."""
        self._lines.put(None)
        self._writer.join(timeout_s)

    def _emit_line(self, line: dict[str, Any]) -> None:
        self._lines.put(line)

    def _write_queued_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            super()._emit_line(line)


def read_recent_events(path: Path) -> list[dict[str, Any]]:
    """The events at the end of the log, oldest first; none if there is no log."""
    try:
        content = read_tail(path, RECENT_BYTES)
    except FileNotFoundError:
        return []
    return decode_lines(content, dict[str, Any], f"the end of {path},")
