"""What a run tells about itself: log lines, events, metrics."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EVALUATION = "eval/reward"
"""The metric of a step that was evaluated: the mean reward of the held-out tasks."""


def set_up_logging(level: int = logging.INFO) -> None:
    """One line per record on standard error, which the supervisor redirects to the role's log."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON object in a single write, so that lines of several writers never mix.

    Raises:
        OSError: The storage refused, or took a part of the line only.
    """
    line = (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if (taken_bytes := os.write(descriptor, line)) != len(line):
            raise OSError(errno.ENOSPC, f"{path} took {taken_bytes} of {len(line)} bytes")
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line; a line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line]


def read_step_lines(path: Path) -> list[dict[str, Any]]:
    """One record for each step, in the order of steps: what several lines say of one is merged.

    Args:
        path: JSON lines with a key `step`, as metrics are written.
    """
    found: dict[int, dict[str, Any]] = {}
    for line in read_json_lines(path):
        found.setdefault(line["step"], {}).update(line)
    return [found[step] for step in sorted(found)]


class EventLog:
    """Append-only `events.jsonl`: what happened, when, to which role."""

    def __init__(self, path: Path, role: str) -> None:
        self._path = path
        self._role = role

    def record(self, event: str, **facts: Any) -> None:
        """Note that `event` happened now."""
        append_json_line(
            self._path, {"time": round(time.time(), 3), "role": self._role, "event": event, **facts}
        )


class PhaseTimer:
    """Adds up wall time per named phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under `name`; repeated blocks add up."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """`time/<phase>_s` for every phase seen."""
        return {f"time/{name}_s": round(value, 4) for name, value in self.seconds.items()}
