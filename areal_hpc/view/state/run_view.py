"""State of a run, in one object for `status`, `why`, `list`, pages, report and terminal."""

import json
import math
import re
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.errors import ArealError, ClusterError, RecipeError
from areal_hpc.metrics.alerts import (
    MAX_FAILED_SHARE_OF_TRIES,
    MIN_FAILED_TRIES_IN_STEP,
    Alert,
    find_alerts,
)
from areal_hpc.metrics.step_metrics import (
    VALIDATION_REWARD_METRIC,
    StepTimes,
    is_failed_training_try,
    measure_step_times,
    read_metrics,
    select_paced_rows,
)
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.jobs import Submission, TaskExit, read_launch_file
from areal_hpc.rundir.jsonl import read_readable_records, read_tail_lines
from areal_hpc.rundir.paths import JobPaths, RunPaths
from areal_hpc.rundir.run_inputs import get_recipe_value, read_run_recipe
from areal_hpc.rundir.telemetry.events import read_recent_events
from areal_hpc.slurm.queue import QueuePoller, SlurmJobRecord, query_squeue_of_user
from areal_hpc.slurm.run_jobs import list_recorded_job_ids, list_unrecorded_live_jobs
from areal_hpc.slurm.states import is_slurm_error_line
from areal_hpc.view.events import TRACEBACK_HEADER, AgentFailures
from areal_hpc.view.logs import LogFile, list_log_files, parse_log_records
from areal_hpc.view.state.jobs import RunJobs, build_run_jobs, fetch_run_jobs, get_run_state
from areal_hpc.wire.ledger import Empty, LedgerStatus

MIN_PACE_STEPS = 3
LOG_TAIL_BYTES = 64 * 1024
MIN_QUERY_INTERVAL_S = 15.0


@dataclass(frozen=True, slots=True)
class LogTraceback:
    at: float | None
    """Unix time of the last line before it that has a time."""
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
class HeldResources:
    """GPUs that the jobs of a run hold; nodes if they have no GPUs."""

    unit: str
    """`GPU` or `node`."""
    trainer: int
    cells: int
    """Number that all cells hold together."""
    cell_count: int


class RunView:
    """State of a run from its files, Slurm and its ledger; each part is read at its first use."""

    def __init__(
        self,
        paths: RunPaths,
        queue: QueuePoller | None = None,
        jobs: RunJobs | None = None,
        problem: str = "",
    ) -> None:
        self.paths = paths
        self.problem = problem
        """Reason why the state of its jobs cannot be read; empty if it can."""
        self._queue = queue or QueuePoller()
        if jobs is not None:
            self.jobs = jobs
        self._stamps = self._read_stamps()

    def look_again(self) -> None:
        """Drop everything that was read, except rows of steps whose files have not changed."""
        stamps = self._read_stamps()
        kept = {"steps", "sft"} if stamps == self._stamps else set()
        self._stamps = stamps
        for name in [*self.__dict__]:
            if name not in kept and isinstance(getattr(type(self), name, None), cached_property):
                del self.__dict__[name]

    def _read_stamps(self) -> list[tuple[int, ...]]:
        """Read stamps that differ after a change of step files; call it before reading those."""
        stamps: list[tuple[int, ...]] = []
        for path in (self.paths.metrics, self.paths.sft_metrics):
            with suppress(FileNotFoundError):
                stat = path.stat()
                stamps.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return stamps

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return read_run_recipe(self.paths.recipe)

    @property
    def is_sft_alone(self) -> bool:
        return self.recipe.get("train_dataset", "") is None

    @property
    def total_steps(self) -> int:
        section = "sft" if self.is_sft_alone else "trainer"
        return int(get_recipe_value(self.recipe, f"{section}.total_steps") or 0)

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`, oldest first."""
        return read_metrics(self.paths.metrics)

    @property
    def step(self) -> int:
        rows = self.sft if self.is_sft_alone else self.steps
        return int(rows[-1]["step"]) if rows else 0

    @property
    def trained_rows(self) -> list[dict[str, Any]]:
        return [row for row in self.steps if "reward/mean" in row]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        rows = [(row["step"], row.get(VALIDATION_REWARD_METRIC)) for row in self.steps]
        return [(step, reward) for step, reward in rows if reward is not None]

    @property
    def step_times(self) -> StepTimes | None:
        """Mean time of the last steps, with the share of each part of the system."""
        return measure_step_times(select_paced_rows(self.steps))

    @cached_property
    def pace(self) -> StepPace | None:
        rows = select_paced_rows(self.steps)
        if len(rows) < MIN_PACE_STEPS:
            return None
        median_s = statistics.median(row["time/step_s"] for row in rows)
        return StepPace(median_s, self.paths.metrics.stat().st_mtime)

    @cached_property
    def sft(self) -> list[dict[str, Any]]:
        """Rows of `sft_metrics.jsonl`, oldest first."""
        return read_readable_records(self.paths.sft_metrics)

    @cached_property
    def ledger(self) -> LedgerStatus | None:
        """Status of the ledger; None while it does not answer."""
        # Imported here: it loads two HTTP libraries that most commands do not need.
        from areal_hpc.rundir.service_client import ServiceClient

        paths, service = self.paths, rendezvous.LEDGER_SERVICE
        try:
            key = rendezvous.read_service_key(paths.service_key)
            client = ServiceClient(paths.rendezvous_dir, service, key, timeout_s=0.5)
        except (OSError, RecipeError):  # damaged, or a key of another user
            return None
        try:
            return client.call("/status", Empty(), LedgerStatus)
        except (OSError, ClusterError):
            return None  # starting, restarting or gone: the display uses the files alone
        finally:
            client.close()

    @cached_property
    def launches(self) -> list[dict[str, Any]]:
        """Entries of `provenance.json`, oldest first; none if it is missing or damaged."""
        try:
            entries = json.loads(self.paths.provenance.read_bytes())["launches"]
            return [entry for entry in entries if isinstance(entry, dict)]
        except (OSError, ValueError, LookupError, TypeError):
            return []

    @property
    def launch_times(self) -> list[tuple[int, float]]:
        """Attempts with the Unix times of their launches, oldest first."""
        times = []
        for launch in self.launches:
            with suppress(ValueError, LookupError, TypeError):
                launched_at = datetime.fromisoformat(launch["time"]).timestamp()
                times.append((int(launch.get("attempt", 0)), launched_at))
        return times

    @property
    def last_launch_at(self) -> float:
        """Unix time of the last `run` or `submit`; 0 if it was not recorded."""
        return self.launch_times[-1][1] if self.launch_times else 0.0

    @cached_property
    def recent_events(self) -> list[dict[str, Any]]:
        return read_recent_events(self.paths.events)

    @cached_property
    def events(self) -> Sequence[dict[str, Any]]:
        """Recent events since the last launch."""
        since = self.last_launch_at
        return [event for event in self.recent_events if event["time"] >= since]

    @cached_property
    def agent_failures(self) -> AgentFailures:
        return AgentFailures.collect(self.events)

    @cached_property
    def alerts(self) -> Sequence[Alert]:
        """Alerts by the rules of the recipe, failures first.

        Before the first trained step, which agents that always fail prevent, they rest on events.
        """
        off = self.alerts_off
        if any(row.get("episodes") for row in self.steps) or "failing_agents" in off:
            return find_alerts(self.steps, off)
        failing = find_early_alert(self.events)
        return [failing] if failing else []

    @property
    def alerts_off(self) -> list[str]:
        """Rules that the recipe switches off; none if it cannot be read."""
        with suppress(RecipeError):
            off = get_recipe_value(self.recipe, "alerts.off")
            return off if isinstance(off, list) else []
        return []

    @property
    def failure_alerts(self) -> list[Alert]:
        return [alert for alert in self.alerts if alert.level == "failure"]

    @cached_property
    def checkpoint(self) -> tuple[int, float] | None:
        """Step and Unix time of the newest checkpoint."""
        # The audit reports damaged checkpoints.
        paths = self.paths
        folder = paths.sft_checkpoints_dir if self.is_sft_alone else paths.checkpoints_dir
        checkpoints = list_checkpoints(folder, problems=[])
        return (checkpoints[-1].state.step, checkpoints[-1].written_at) if checkpoints else None

    @cached_property
    def held_resources(self) -> HeldResources | None:
        """Resources of the jobs by the last launch of each; None if files cannot be read."""
        return _read_held_resources(
            self.paths, int(get_recipe_value(self.recipe, "inference.cells") or 1)
        )

    @cached_property
    def jobs(self) -> RunJobs:
        return fetch_run_jobs(self.paths, self._queue)

    @property
    def state(self) -> str:
        return "unreadable" if self.problem else get_run_state(self.jobs)

    @property
    def is_running(self) -> bool:
        return self.state.startswith("running")

    @cached_property
    def starts_in_accounting(self) -> Sequence[SlurmJobRecord]:
        """All starts of jobs in Slurm's accounting, oldest first."""
        return self._queue.read_accounting(self._submissions)

    @property
    def _submissions(self) -> dict[str, Submission]:
        return {job.submission.job_id: job.submission for job in self.jobs.jobs if job.submission}

    @cached_property
    def task_exits(self) -> Sequence[TaskExitRecord]:
        """Exits of tasks that ended since the last launch."""
        since = self.last_launch_at
        return [record for record in read_exit_records(self.jobs) if record.at >= since]

    @cached_property
    def tracebacks(self) -> Sequence[LogTraceback]:
        """Last traceback of every log whose process died, the oldest first.

        If one rank fails, the collectives of the others break a moment later: the oldest
        traceback shows the cause.
        """
        attempts = self.paths.list_attempts()
        exits = [row for row in self.events if row["event"] == "process_exited"]
        died = {(row["role"], row["process"]) for row in exits}
        failed = [record for record in self.task_exits if record.outcome.exit_code]
        died |= {(record.job, record.outcome.process) for record in failed}
        if not attempts or not died:
            return []
        stacks = []
        for file in list_log_files(self.paths, attempts[-1]):
            if (file.job_or_cell, re.sub(r"-\d+$", "", file.process)) in died:
                text = read_tail_lines(file.path, LOG_TAIL_BYTES).decode(errors="replace")
                if stack := find_last_traceback(file, text):
                    stacks.append(stack)
        return sorted(stacks, key=lambda item: (item.at is None, item.at or 0.0, item.file.path))

    @cached_property
    def slurm_lines(self) -> Sequence[tuple[str, str]]:
        """Pairs of job and line, of what Slurm itself wrote into the jobs' output."""
        job_by_line: dict[tuple[Path, str], str] = {}
        for submission in self._submissions.values():
            for path in find_slurm_output_files(submission):
                text = read_tail_lines(path, LOG_TAIL_BYTES).decode(errors="replace")
                for line in text.splitlines():
                    if is_slurm_error_line(line) or "oom-kill" in line:
                        job_by_line[path, line] = submission.job
        return [(job, line) for (_, line), job in job_by_line.items()]

    @cached_property
    def excluded_nodes(self) -> Sequence[dict[str, Any]]:
        return read_readable_records(self.paths.excluded_nodes)

    @cached_property
    def free_bytes(self) -> int | None:
        with suppress(OSError):
            return shutil.disk_usage(self.paths.root).free
        return None


def view_runs(runs: Sequence[RunPaths], queue: QueuePoller) -> list[RunView]:
    """Return views of runs, after one query of Slurm for their jobs and one for each owner."""
    ids: list[str] = []
    for paths in runs:
        with suppress(ArealError, OSError):  # reported below
            ids += () if paths.finished_marker.exists() else list_recorded_job_ids(paths)
    snapshot = queue.poll_for_display(ids)
    queued: list[SlurmJobRecord] = []
    if not snapshot.outage:
        owners = {paths.root.stat().st_uid for paths in runs if paths.root.exists()}
        with suppress(ClusterError):  # no answer, or no cluster
            queued = [job for owner in owners for job in query_squeue_of_user(owner)]
    views = []
    for paths in runs:
        try:
            jobs = build_run_jobs(paths, snapshot, list_unrecorded_live_jobs(paths, queued))
            get_run_state(jobs)
            views.append(RunView(paths, queue, jobs))
        except (ArealError, OSError) as error:
            views.append(RunView(paths, queue, problem=str(error)))
    return views


class RunViewer:
    """Cache of views of runs, for pages that browsers request repeatedly."""

    def __init__(self) -> None:
        self._queue = QueuePoller()
        self._lock = threading.Lock()
        self._known: dict[tuple[tuple[Path, bool], ...], tuple[float, list[RunView]]] = {}

    def view(self, runs: Sequence[RunPaths]) -> list[RunView]:
        """Return views of runs; query Slurm again when a run has ended, and after 15 seconds."""
        key = tuple((run.root, run.finished_marker.exists()) for run in runs)
        with self._lock:
            queried_at, views = self._known.get(key, (-math.inf, []))
            if time.monotonic() - queried_at > max(MIN_QUERY_INTERVAL_S, self._queue.pause_s):
                views = view_runs(runs, self._queue)
                self._known[key] = time.monotonic(), views
        # New views read the files again.
        return [
            RunView(view.paths, self._queue, None if view.problem else view.jobs, view.problem)
            for view in views
        ]


def find_early_alert(events: Sequence[dict[str, Any]]) -> Alert | None:
    failures = [event for event in events if is_failed_training_try(event)]
    if len(failures) < MIN_FAILED_TRIES_IN_STEP:
        return None
    ended_well = _count_good_ends(events)
    if len(failures) / (len(failures) + ended_well) <= MAX_FAILED_SHARE_OF_TRIES:
        return None
    newest = failures[-1]
    reason = str(newest.get("message") or newest.get("reason", "")).strip().splitlines()
    last = f"; the last: {reason[-1][:300]}" if reason else ""
    return Alert(
        "failing_agents",
        "failure",
        0,
        f"{len(failures)} tries of episodes failed, and no step has been trained{last}",
        "areal-hpc why RUN names their errors",
    )


def _count_good_ends(events: Sequence[dict[str, Any]]) -> int:
    """Count the episodes without failure since a driver's first failed try, by its own counts.

    Held-out episodes before that try do not count: they show nothing about training tasks.
    """
    first: dict[str, int] = {}
    newest: dict[str, int] = {}
    for event in events:
        role, failed, ended = event["role"], event.get("failed"), event.get("ended")
        if not (isinstance(failed, int) and isinstance(ended, int)):
            continue
        if role in first or is_failed_training_try(event):
            first.setdefault(role, ended - failed)
            newest[role] = max(newest.get(role, 0), ended - failed)
    return sum(newest[role] - first[role] for role in first)


def _read_held_resources(paths: RunPaths, cell_count: int) -> HeldResources | None:
    trainer_gpus = trainer_nodes = 0
    cells: dict[str, tuple[int, int]] = {}
    try:
        folders = (paths.job(folder.name) for folder in paths.jobs_dir.glob("*"))
        jobs = [job for job in folders if job.launch.exists()]
        for job in sorted(jobs, key=lambda job: job.launch.stat().st_mtime):
            spec = read_launch_file(job.launch).job
            if spec.name == "trainer":
                trainer_gpus, trainer_nodes = spec.tasks * spec.gpus_per_task, _count_nodes(job)
            elif rendezvous.is_training_cell_job(spec.name):
                cells[spec.name] = (spec.tasks * spec.gpus_per_task, _count_nodes(job))
    except (OSError, ValueError, msgspec.DecodeError):  # of another user, or of another version
        return None
    cell_gpus, cell_nodes = (sum(held) for held in zip((0, 0), *cells.values(), strict=True))
    if trainer_gpus + cell_gpus:
        return HeldResources("GPU", trainer_gpus, cell_gpus, cell_count)
    return HeldResources("node", trainer_nodes, cell_nodes, cell_count) if trainer_nodes else None


def _count_nodes(job: JobPaths) -> int:
    text = job.script.read_text() if job.script.exists() else ""
    match = re.search(r"^#SBATCH --nodes=(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 1


def read_exit_records(run: RunJobs) -> Iterator[TaskExitRecord]:
    for job in run.jobs:
        for rank, outcome in job.task_exits.items():
            path = run.paths.job(job.name).task_exit(rank)
            with suppress(FileNotFoundError):  # the job starts again at this moment
                yield TaskExitRecord(job.name, rank, path.stat().st_mtime, outcome)


def find_last_traceback(file: LogFile, text: str) -> LogTraceback | None:
    """Return the last traceback in a piece of a log; of chained ones the first, the cause."""
    for record in reversed(parse_log_records(text)):
        begins = [number for number, line in enumerate(record.lines) if TRACEBACK_HEADER in line]
        if begins:
            lines = record.lines[begins[0] :]
            # The first line that is not indented is the error.
            end = next(
                (i for i, line in enumerate(lines) if i and line and line[0] not in " \t|+"),
                len(lines),
            )
            written_at = None
            with suppress(ValueError, OverflowError, OSError):
                written_at = datetime.fromisoformat(record.time).timestamp()
            return LogTraceback(written_at, file, lines[: end + 1])
    return None


def find_slurm_output_files(submission: Submission) -> list[Path]:
    script = Path(submission.script)
    if not script.exists():
        return []
    job_id, _, member = submission.job_id.partition("_")
    words = {"%j": submission.job_id, "%A": job_id, "%a": member or "*", "%t": "*", "%N": "*"}
    paths: set[Path] = set()
    for pattern in re.findall(r"--(?:output|error)[= ]('[^']*'|\S+)", script.read_text()):
        name = pattern.strip("'\"")
        for word, value in words.items():
            name = name.replace(word, value)
        if name.startswith("/"):
            paths |= set(Path(name).parent.glob(Path(name).name))
    return sorted(path for path in paths if path.is_file())
