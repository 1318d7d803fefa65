"""Spans of a run's processes: named intervals of time, as JSON lines in `spans/`.

Each process appends to a file of its own, `<job>-<process>.jsonl`, through a thread for which it
never waits. Spans that cannot be written are lost and counted: training does not depend on them. A
file that reaches its size limit replaces the `.older` file.
"""

import contextlib
import logging
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from areal_hpc.rundir.jsonl import append_lines

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 << 20
"""Size limit of a file; a process has at most two files."""
MIN_FREE_BYTES = 256 << 20
"""Free space below which no spans are written, as the run itself needs the space."""
MAX_PENDING_SPANS = 20_000
"""Spans kept while the storage does not respond; further spans are lost."""
FLUSH_INTERVAL_S = 5.0
"""Time between flushes. Each costs two calls to the metadata server of shared storage."""
STORAGE_LOOK_INTERVAL_S = 30.0
"""Time between two looks at the free space and the size of the file."""
LASTING_SPAN_REPORT_DELAY_S = 20.0
"""Duration after which a span is reported once before it ends."""
STATE_INTERVAL_S = 10.0
"""Time after which a lasting state is written in pieces, the most that a kill can lose."""
REFUSED_PAUSE_S = 30.0
"""Pause after an error of the storage."""
MERGE_GAP_S = 0.005
"""Gap up to which equal consecutive spans are written as one."""
TIME_DIGITS = 4


class ProcessStart(Struct, frozen=True, tag="process", omit_defaults=True):
    """Start of a process, to which the lines after it belong."""

    at: float
    """Unix seconds of the node's own clock, as are all times in the file. Spans begin later."""
    node: str
    pid: int
    began_at: float = 0.0
    """Begin of the process, which is earlier than `at` in a file that follows a rotation."""


class Span(Struct, frozen=True, tag="span", omit_defaults=True):
    name: str
    begin: float
    end: float
    lane: str = ""
    """Part of the process that does it, such as `replica 0`; empty for the whole process."""
    facts: dict[str, Any] = {}


class BegunSpan(Struct, frozen=True, tag="begun", omit_defaults=True):
    """Work under way: its span follows when it ends, unless the process ends first."""

    name: str
    begin: float
    at: float
    """Time at which it still lasted."""
    lane: str = ""
    facts: dict[str, Any] = {}


class LostSpans(Struct, frozen=True, tag="lost"):
    """Number of earlier spans that could not be written."""

    at: float
    count: int


SpanLine = ProcessStart | Span | BegunSpan | LostSpans


class SpanLog:
    """Writer of one process's spans. Its methods neither wait for storage nor raise."""

    def __init__(
        self,
        path: Path,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        min_free_bytes: int = MIN_FREE_BYTES,
    ) -> None:
        self._path = path
        self._max_file_bytes, self._min_free_bytes = max_file_bytes, min_free_bytes
        self._lock = threading.RLock()
        now = round(time.time(), TIME_DIGITS)
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._start = ProcessStart(now, node, os.getpid(), now)
        self._pending: list[SpanLine] = [self._start]
        self._state: Span | None = None
        self._open: dict[int, Span] = {}
        """Spans under way that were not reported yet, by their numbers."""
        self._opened = 0
        self._lost = 0
        self._refused_until_s = self._look_at_s = -math.inf
        self._has_warned = False
        self._is_over = threading.Event()
        self._writer = threading.Thread(target=self._run, name="spans", daemon=True)
        self._writer.start()

    def add(self, line: SpanLine) -> None:
        with self._lock:
            last = self._pending[-1] if self._pending else None
            if isinstance(last, Span) and isinstance(line, Span) and _continues(last, line):
                self._pending[-1] = _build_span(last, line.end)
            elif len(self._pending) < MAX_PENDING_SPANS:
                self._pending.append(line)
            else:
                self._lost += 1

    def record_state_entry(self, state_name: str) -> None:
        """Record that the process enters a state now; an empty name ends the previous state."""
        now = time.time()
        with self._lock:
            if self._state is not None:
                if self._state.name == state_name:
                    return
                self.add(_build_span(self._state, now))
            self._state = Span(state_name, now, now) if state_name else None

    def begin(self, span: Span) -> int:
        """Record a span that begins now; return the number by which to end it."""
        with self._lock:
            self._opened += 1
            self._open[self._opened] = span
            return self._opened

    def end(self, span_number: int, span: Span) -> None:
        with self._lock:
            self._open.pop(span_number, None)
        self.add(span)

    def close(self, timeout_s: float = 1.0) -> None:
        self.record_state_entry("")
        self._is_over.set()
        self._writer.join(timeout_s)

    def _run(self) -> None:
        while not self._is_over.wait(FLUSH_INTERVAL_S):
            self._split_lasting_state()
            self._report_lasting_spans()
            self._flush()
        self._refused_until_s = -math.inf
        self._flush()

    def _split_lasting_state(self) -> None:
        now = time.time()
        with self._lock:
            state = self._state
            if state is not None and now - state.begin >= STATE_INTERVAL_S:
                self._state = Span(state.name, now, now)
                self.add(_build_span(state, now))

    def _report_lasting_spans(self) -> None:
        now = time.time()
        with self._lock:
            due = {
                key: span
                for key, span in self._open.items()
                if now - span.begin >= LASTING_SPAN_REPORT_DELAY_S
            }
            for key, span in due.items():
                del self._open[key]
                begin, at = round(span.begin, TIME_DIGITS), round(now, TIME_DIGITS)
                self.add(BegunSpan(span.name, begin, at, span.lane, dict(span.facts)))

    def _flush(self) -> None:
        if time.monotonic() < self._refused_until_s:
            return
        with self._lock:
            lines, self._pending = self._pending, []
            lost, self._lost = self._lost, 0
        if lost:
            lines.append(LostSpans(round(time.time(), TIME_DIGITS), lost))
        if not lines:
            return
        try:
            self._write(lines)
        except OSError as error:
            self._on_refused(error, sum(isinstance(line, Span) for line in lines) + lost)

    def _write(self, lines: list[SpanLine]) -> None:
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._path.parent.mkdir(exist_ok=True)
            if shutil.disk_usage(self._path.parent).free < self._min_free_bytes:
                raise OSError(f"less than {self._min_free_bytes >> 20} MiB are free")
            if self._rotate_large_file():
                begins = (line.begin for line in lines if isinstance(line, Span))
                at = min(begins, default=time.time())
                lines.insert(0, msgspec.structs.replace(self._start, at=round(at, TIME_DIGITS)))
            self._look_at_s = now_s + STORAGE_LOOK_INTERVAL_S
        append_lines(self._path, lines)

    def _rotate_large_file(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size >= self._max_file_bytes:
                self._path.replace(get_older_path(self._path))
                return True
        return False

    def _on_refused(self, error: OSError, lost: int) -> None:
        with self._lock:
            self._lost += lost
        self._refused_until_s = time.monotonic() + REFUSED_PAUSE_S
        self._look_at_s = -math.inf
        if not self._has_warned:
            self._has_warned = True
            log.warning("spans cannot be written to %s (the run goes on): %s", self._path, error)


def _continues(last_span: Span, line: Span) -> bool:
    same = (last_span.name, last_span.lane, last_span.facts) == (line.name, line.lane, line.facts)
    return same and 0 <= line.begin - last_span.end <= MERGE_GAP_S


def _build_span(span: Span, end_time: float) -> Span:
    return Span(
        span.name,
        round(span.begin, TIME_DIGITS),
        round(max(span.begin, end_time), TIME_DIGITS),
        span.lane,
        span.facts,
    )


def get_older_path(path: Path) -> Path:
    return path.with_suffix(f".older{path.suffix}")


_active: SpanLog | None = None


@contextmanager
def log_spans_of_process(path: Path) -> Iterator[None]:
    """Make `record_span` and `time_span` of this process write to a file within the context."""
    global _active
    _active = SpanLog(path)
    try:
        yield
    finally:
        _active.close()
        _active = None


def record_span(
    span_name: str, begin_time: float, end_time: float, lane: str = "", **span_fields: Any
) -> None:
    """Record a span of this process between two Unix times."""
    if _active is not None:
        _active.add(
            _build_span(Span(span_name, begin_time, begin_time, lane, span_fields), end_time)
        )


@contextmanager
def time_span(span_name: str, lane: str = "", **span_fields: Any) -> Iterator[dict[str, Any]]:
    """Record the block as a span; the block may add facts to the yielded ones."""
    begin, began_s = time.time(), time.perf_counter()
    span = Span(span_name, begin, begin, lane, span_fields)
    number = _active.begin(span) if _active is not None else 0
    try:
        yield span_fields
    finally:
        if _active is not None:
            _active.end(number, _build_span(span, begin + time.perf_counter() - began_s))


def record_state_entry(state_name: str) -> None:
    if _active is not None:
        _active.record_state_entry(state_name)
