"""Logs of all processes of a run, merged by time into one stream."""

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.jsonl import LineFollower, read_tail_lines
from areal_hpc.rundir.paths import RunPaths, list_restart_dirs

TAIL_BYTES_PER_FILE = 256 * 1024
MAX_READ_BYTES = 1024 * 1024
POLL_S = 1.0
"""Seconds between two polls of followed files; a poll is one stat for each file and folder."""

_TIME_PATTERN = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[,.](\d{1,6}))?")
_ROUTINE_PATTERN = re.compile(
    r"(\[[^]]+\] )?((Prefill|Decode) batch|INFO: .*\"(GET|POST) /(health|ready|generate))"
)
"""Lines that SGLang writes for every batch and request."""
_NODE_PATTERN = re.compile(r"\bnode[ =:]+([\w.-]+)")


@dataclass(frozen=True, slots=True)
class LogFile:
    path: Path
    job_or_cell: str
    process: str
    """Name of the process, with the rank if the job has several tasks."""
    node: str
    """Node that the log's first line names; empty if it names none."""

    @property
    def source(self) -> str:
        suffix = f"@{self.node}" if self.node else ""
        return f"{self.job_or_cell}/{self.process}{suffix}"


@dataclass(frozen=True, slots=True, order=True)
class LogRecord:
    """Line of a log that has a time, with the lines below it that have none."""

    time: str
    """Time as written, comparable as text; empty before the first time of a file."""
    lines: tuple[str, ...]


def list_log_files(
    paths: RunPaths, attempt: int, wanted_names: Sequence[str] = ()
) -> list[LogFile]:
    """Return the logs of one attempt, in the order of their names.

    `wanted_names` are jobs (`trainer`, `cell-0`), processes (`proxy`) or both (`cell-0/proxy`);
    empty for all.
    """
    files = []
    for job_dir in sorted(path for path in paths.log_dir(attempt).glob("*") if path.is_dir()):
        for folder in (job_dir, *(restart_dir for _, restart_dir in list_restart_dirs(job_dir))):
            for path in sorted(folder.glob("*.log")):
                if not wanted_names or _is_wanted(wanted_names, job_dir.name, path.stem):
                    with path.open("rb") as stream:
                        first = stream.readline(1000).decode(errors="replace")
                    node = _NODE_PATTERN.search(first)
                    files.append(LogFile(path, job_dir.name, path.stem, node[1] if node else ""))
    return files


def require_log_files(
    paths: RunPaths, attempt: int, wanted_names: Sequence[str] = ()
) -> list[LogFile]:
    """Do the same as `list_log_files`; fail with the names to choose from if there are none."""
    files = list_log_files(paths, attempt, wanted_names)
    if not files:
        known = sorted({file.job_or_cell for file in list_log_files(paths, attempt)})
        raise RecipeError(
            f"attempt {attempt} has no log of {' '.join(wanted_names) or 'any process'}",
            hint=f"choose from {', '.join(known)}" if known else "the jobs have not started",
        )
    return files


def _is_wanted(wanted_names: Sequence[str], job: str, process: str) -> bool:
    names = {process, re.sub(r"-\d+$", "", process)}
    names |= {job, *(f"{job}/{name}" for name in names)}
    return not names.isdisjoint(wanted_names)


def choose_attempt(paths: RunPaths, attempt: int | None) -> int:
    attempts = paths.list_attempts()
    if not attempts:
        raise RecipeError(
            "this run has no logs yet",
            key=str(paths.logs_dir),
            hint="areal-hpc status RUN shows whether any job has started",
        )
    if attempt is not None and attempt not in attempts:
        raise RecipeError(
            f"expected an attempt of {attempts}, got {attempt}",
            key=str(paths.logs_dir),
            hint="leave --attempt out for the newest",
        )
    return attempts[-1] if attempt is None else attempt


def parse_log_records(text: str) -> list[LogRecord]:
    """Split a piece of a log into records; a time before the previous one is raised to that."""
    records: list[LogRecord] = []
    now, lines = "", list[str]()
    for line in text.splitlines():
        match = _TIME_PATTERN.match(line)
        if match:
            if lines:
                records.append(LogRecord(now, tuple(lines)))
            fraction = (match[3] or "").ljust(6, "0")
            now, lines = max(now, f"{match[1]} {match[2]}.{fraction}"), [line]
        else:
            lines.append(line)
    if lines:
        records.append(LogRecord(now, tuple(lines)))
    return records


def merge_lines_by_time(pieces: Sequence[tuple[LogFile, str]]) -> list[tuple[LogFile, str]]:
    streams = [
        [(record.time, number, record) for record in parse_log_records(text)]
        for number, (_, text) in enumerate(pieces)
    ]
    merged = heapq.merge(*streams, key=lambda item: item[:2])
    return [(pieces[number][0], line) for _, number, record in merged for line in record.lines]


def drop_sglang_routine_lines(lines: Sequence[tuple[LogFile, str]]) -> list[tuple[LogFile, str]]:
    return [(file, line) for file, line in lines if not _ROUTINE_PATTERN.match(line)]


def read_last_lines(
    files: Sequence[LogFile], lines: int, *, keep_routine: bool = True
) -> list[tuple[LogFile, str]]:
    """Return the newest lines of all files together, in the order of time.

    Leave out SGLang's lines about every batch and request unless `keep_routine`.
    """
    pieces = [
        (file, read_tail_lines(file.path, TAIL_BYTES_PER_FILE).decode(errors="replace"))
        for file in files
    ]
    merged = merge_lines_by_time(pieces)
    return (merged if keep_routine else drop_sglang_routine_lines(merged))[-lines:] if lines else []


class LogFollower:
    def __init__(self, paths: RunPaths, wanted_names: Sequence[str]) -> None:
        self._paths = paths
        self._wanted = wanted_names
        self._stamps: dict[Path, int] = {}
        self._files: dict[Path, LogFile] = {}
        self._refresh_file_list()
        self._lines = {
            path: LineFollower(path, from_end=True, max_bytes=MAX_READ_BYTES)
            for path in self._files
        }

    @property
    def files(self) -> list[LogFile]:
        return list(self._files.values())

    def read_new_lines(self) -> list[tuple[LogFile, str]]:
        # The times of folders show new and removed entries, so no folder is listed for that.
        if any(_read_mtime_ns(folder) != stamp for folder, stamp in self._stamps.items()):
            self._refresh_file_list()
        return merge_lines_by_time(
            [(file, self._read_new_text(path)) for path, file in self._files.items()]
        )

    def _read_new_text(self, path: Path) -> str:
        lines = self._lines.get(path)
        if lines is None:
            lines = self._lines[path] = LineFollower(path, max_bytes=MAX_READ_BYTES)
        try:
            return lines.read_new_lines().decode(errors="replace")
        except FileNotFoundError:  # removed with its run, which may start over
            return ""

    def _refresh_file_list(self) -> None:
        self._stamps = {self._paths.logs_dir: _read_mtime_ns(self._paths.logs_dir)}
        attempts = self._paths.list_attempts()
        if not attempts:
            return
        root = self._paths.log_dir(attempts[-1])
        jobs = [path for path in root.glob("*") if path.is_dir()]
        restarts = [path for job in jobs for _, path in list_restart_dirs(job)]
        self._stamps |= {folder: _read_mtime_ns(folder) for folder in [root, *jobs, *restarts]}
        for file in list_log_files(self._paths, attempts[-1], self._wanted):
            known = self._files.get(file.path)
            if known is None or not known.node:  # the first line may have come since
                self._files[file.path] = file


def _read_mtime_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
