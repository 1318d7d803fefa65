"""Event log of a run, `events.jsonl`: what happened, when, to which role."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from areal_hpc.rundir.jsonl import append_line, decode_lines

READ_BYTES = 1 << 20
"""The end of the log that is read, for those who look for what happened lately."""


class EventLog:
    """Append-only `events.jsonl`: what happened, when, to which role."""

    def __init__(self, path: Path, role: str) -> None:
        self._path = path
        self._role = role

    def record(self, event: str, **facts: Any) -> None:
        """Note that `event` happened now."""
        line = {"time": round(time.time(), 3), "role": self._role, "event": event, **facts}
        append_line(self._path, line)


def read_recent_events(path: Path, size_bytes: int = READ_BYTES) -> list[dict[str, Any]]:
    """The events at the end of the log, oldest first; none if there is no log."""
    try:
        with path.open("rb") as stream:
            begin = stream.seek(max(0, path.stat().st_size - size_bytes))
            content = stream.read()
    except FileNotFoundError:
        return []
    whole_lines = content.partition(b"\n")[2] if begin else content
    return decode_lines(whole_lines, dict[str, Any], f"the end of {path},")
