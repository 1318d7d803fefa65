"""Event log of a run, `events.jsonl`: what happened, when, to which service."""

import time
from pathlib import Path
from typing import Any

from areal_hpc.rundir.jsonl import append_line, decode_lines, read_tail

RECENT_BYTES = 1 << 20
"""The end of the log that is read, for those who look for what happened lately."""


class EventLog:
    """Append-only `events.jsonl`: what happened, when, to which service."""

    def __init__(self, path: Path, role: str) -> None:
        self._path = path
        self._role = role

    def record(self, event: str, **facts: Any) -> None:
        """Note that `event` happened now."""
        line = {"time": round(time.time(), 3), "role": self._role, "event": event, **facts}
        append_line(self._path, line)


def read_recent_events(path: Path) -> list[dict[str, Any]]:
    """The events at the end of the log, oldest first; none if there is no log."""
    try:
        content = read_tail(path, RECENT_BYTES)
    except FileNotFoundError:
        return []
    return decode_lines(content, dict[str, Any], f"the end of {path},")
