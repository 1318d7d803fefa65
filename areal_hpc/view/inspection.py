"""Collection of a run's logs, events and exit statuses for diagnosis."""

import re
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from areal_hpc.metrics.alerts import Alert
from areal_hpc.metrics.step_line import describe_step_efficiency
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.jobs import Submission, TaskExit
from areal_hpc.rundir.jsonl import read_readable_records, read_tail_lines
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuePoller, SlurmJobRecord
from areal_hpc.slurm.versions import is_slurm_error_line
from areal_hpc.view.events.agent_failures import TRACEBACK_HEADER
from areal_hpc.view.logs import LogFile, list_log_files, parse_log_records
from areal_hpc.view.state.alerts_at_newest_step import find_run_alerts
from areal_hpc.view.state.jobs import RunJobs, fetch_run_jobs
from areal_hpc.view.state.run_state import read_events_since_launch, read_last_launch_time

PACE_STEPS = 50
MIN_PACE_STEPS = 3
LOG_TAIL_BYTES = 64 * 1024

_OOM_PATTERN = re.compile(r"oom[-_ ]kill|out of memory|OutOfMemoryError|MemoryError", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LogTraceback:
    at: float | None
    """Unix time of the last line before it that bears a time."""
    file: LogFile
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TaskExitRecord:
    job: str
    rank: int
    at: float
    outcome: TaskExit


@dataclass(frozen=True, slots=True)
class StepPace:
    median_s: float
    last_at: float


@dataclass(frozen=True, slots=True)
class RunInspection:
    run: RunJobs
    starts_in_accounting: tuple[SlurmJobRecord, ...]
    """Every start of every job that accounting knows, oldest first."""
    events: tuple[dict[str, Any], ...]
    """Since the run was last submitted."""
    task_exits: tuple[TaskExitRecord, ...]
    tracebacks: tuple[LogTraceback, ...]
    """Of processes that died, oldest first."""
    slurm_lines: tuple[tuple[str, str], ...]
    """(job, line): what Slurm itself wrote into the jobs' output."""
    excluded: tuple[dict[str, Any], ...]
    pace: StepPace | None = None
    alerts: tuple[Alert, ...] = ()
    step_time_lines: tuple[str, ...] = ()
    free_bytes: int | None = None


def inspect_run(paths: RunPaths, queue: QueuePoller) -> RunInspection:
    run, free_bytes = fetch_run_jobs(paths, queue), None
    with suppress(OSError):
        free_bytes = shutil.disk_usage(paths.root).free
    submissions = {job.submission.job_id: job.submission for job in run.jobs if job.submission}
    since, events = read_last_launch_time(paths), read_events_since_launch(paths)
    task_exits = tuple(word for word in read_exit_records(run) if word.at >= since)
    return RunInspection(
        run=run,
        starts_in_accounting=tuple(queue.read_accounting(submissions)),
        events=tuple(events),
        task_exits=task_exits,
        tracebacks=tuple(_find_tracebacks(paths, events, task_exits)),
        slurm_lines=tuple(_read_slurm_lines(list(submissions.values()))),
        excluded=tuple(read_readable_records(paths.excluded_nodes)),
        pace=read_step_pace(paths),
        alerts=tuple(find_run_alerts(paths)),
        step_time_lines=tuple(describe_step_efficiency(read_metrics(paths.metrics)[-PACE_STEPS:])),
        free_bytes=free_bytes,
    )


def read_step_pace(paths: RunPaths) -> StepPace | None:
    rows = read_metrics(paths.metrics)[-PACE_STEPS:]
    times_s = [row["time/step_s"] for row in rows if "time/step_s" in row]
    if len(times_s) < MIN_PACE_STEPS:
        return None
    return StepPace(statistics.median(times_s), paths.metrics.stat().st_mtime)


def read_exit_records(run: RunJobs) -> Iterator[TaskExitRecord]:
    for job in run.jobs:
        for rank, outcome in job.task_exits.items():
            path = run.paths.job(job.name).task_exit(rank)
            with suppress(FileNotFoundError):  # the job starts again at this moment
                yield TaskExitRecord(job.name, rank, path.stat().st_mtime, outcome)


def _find_tracebacks(
    paths: RunPaths, events: Sequence[dict[str, Any]], task_exits: Sequence[TaskExitRecord]
) -> list[LogTraceback]:
    """The last traceback of every log whose process died, the oldest first.

    When one rank fails, the collectives of the others break a moment later: the oldest is the one
    to read.
    """
    attempts = paths.list_attempts()
    died = {(row["role"], row["process"]) for row in events if row["event"] == "process_exited"}
    died |= {(word.job, word.outcome.process) for word in task_exits if word.outcome.exit_code}
    if not attempts or not died:
        return []
    found = []
    for file in list_log_files(paths, attempts[-1]):
        if (file.job_or_cell, re.sub(r"-\d+$", "", file.process)) in died:
            text = read_tail_lines(file.path, LOG_TAIL_BYTES).decode(errors="replace")
            stack = find_last_traceback(file, text)
            found += [stack] if stack else []
    return sorted(found, key=lambda stack: (stack.at is None, stack.at or 0.0, stack.file.path))


def find_last_traceback(file: LogFile, text: str) -> LogTraceback | None:
    """The last traceback in a piece of a log; of chained ones the first, which is the cause."""
    for record in reversed(parse_log_records(text)):
        begins = [number for number, line in enumerate(record.lines) if TRACEBACK_HEADER in line]
        if begins:
            lines = record.lines[begins[0] :]
            # The first line that is not indented is the error.
            end = next(
                (at for at, line in enumerate(lines) if at and line and line[0] not in " \t|+"),
                len(lines),
            )
            time = None
            with suppress(ValueError, OverflowError, OSError):
                time = datetime.fromisoformat(record.time).timestamp()
            return LogTraceback(time, file, lines[: end + 1])
    return None


def _read_slurm_lines(submissions: Sequence[Submission]) -> Iterator[tuple[str, str]]:
    for submission in submissions:
        for path in find_slurm_output_files(submission):
            seen = set()
            for line in read_tail_lines(path, LOG_TAIL_BYTES).decode(errors="replace").splitlines():
                if (is_slurm_error_line(line) or "oom-kill" in line) and line not in seen:
                    seen.add(line)
                    yield submission.job, line


def find_slurm_output_files(submission: Submission) -> list[Path]:
    script = Path(submission.script)
    if not script.exists():
        return []
    job_id, _, member = submission.job_id.partition("_")
    words = {"%j": submission.job_id, "%A": job_id, "%a": member or "*", "%t": "*", "%N": "*"}
    found: set[Path] = set()
    for pattern in re.findall(r"--(?:output|error)[= ]('[^']*'|\S+)", script.read_text()):
        name = pattern.strip("'\"")
        for word, value in words.items():
            name = name.replace(word, value)
        if name.startswith("/"):
            found |= set(Path(name).parent.glob(Path(name).name))
    return sorted(path for path in found if path.is_file())


def mentions_oom(text: str) -> bool:
    return _OOM_PATTERN.search(text) is not None
