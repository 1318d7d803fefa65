"""Jobs of a run: their submissions, Slurm's records of them, and exits that tasks recorded."""

import contextlib
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    IDLE_EXIT_CODE,
    Submission,
    TaskExit,
    get_latest_submissions,
    read_submissions,
    read_task_exits,
)
from areal_hpc.rundir.lock import find_live_launcher_note, is_lock_held
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import is_cell_job
from areal_hpc.slurm.commands import has_slurm
from areal_hpc.slurm.queue import QueuePoller, QueueSnapshot, SlurmJobRecord, is_live_state
from areal_hpc.slurm.run_jobs import (
    LiveJob,
    find_run_of_jobs,
    is_job_of_run,
    list_recorded_job_ids,
    list_unrecorded_live_jobs,
)
from areal_hpc.slurm.states import JobPhase, PendingReasonExplanation, explain_reason
from areal_hpc.view.formatting import format_duration, format_table, format_time

LEADER_JOB_NAMES = {"sft", "trainer"}
"""Jobs for which the others of their stage wait."""


@dataclass(frozen=True, slots=True)
class JobView:
    name: str
    submission: Submission | None
    """None for a job of a foreground run."""
    slurm_record: SlurmJobRecord | None
    """None if Slurm has no record of it, or does not answer."""
    task_exits: dict[int, TaskExit]
    """Exit of each task that has ended, by rank."""
    is_recorded: bool = True
    """False for a job in Slurm whose comment names this run, but which no file records."""

    @property
    def is_alive(self) -> bool:
        return self.slurm_record is not None and is_live_state(self.slurm_record.state)

    @property
    def waits_behind_others(self) -> bool:
        """Return whether it is the caretaker's job, pending while others of the run exist."""
        queued = self.slurm_record
        return self.name == CARETAKER_JOB and queued is not None and queued.reason == "Dependency"

    @property
    def ended_idle(self) -> bool:
        """Return whether it released its nodes; a caretaker submits it when its partners exist."""
        exits = self.task_exits.values()
        is_idle = any(outcome.exit_code == IDLE_EXIT_CODE for outcome in exits)
        return is_idle and not self.is_alive and not any(outcome.is_crash for outcome in exits)

    @property
    def ended_before_its_tasks(self) -> bool:
        is_completed = self.slurm_record and self.slurm_record.state.name == "COMPLETED"
        exit_codes = [outcome.exit_code for outcome in self.task_exits.values()]
        return bool(is_completed) and 0 not in exit_codes

    @property
    def has_failed(self) -> bool:
        if self.slurm_record is not None and self.slurm_record.state.phase is not JobPhase.UNKNOWN:
            return self.slurm_record.state.is_over_without_success or self.ended_before_its_tasks
        return any(outcome.is_crash for outcome in self.task_exits.values())

    @property
    def pending_reason(self) -> PendingReasonExplanation | None:
        """Reason why it is pending; None if it is not, or if its state names a hold."""
        if self.slurm_record is None or self.slurm_record.state.phase is not JobPhase.WAITING:
            return None
        return (
            explain_reason(self.slurm_record.reason)
            if self.slurm_record.state.name == "PENDING"
            else None
        )


@dataclass(frozen=True, slots=True)
class RunJobs:
    paths: RunPaths
    jobs: tuple[JobView, ...]
    snapshot: QueueSnapshot
    ids: tuple[str, ...]
    """All job ids of the run, oldest first."""
    original: Path | None = None
    """Run of which this folder is a copy, while jobs of that run wait or run."""

    @property
    def is_local(self) -> bool:
        return not self.ids

    @property
    def jobs_ended_before_run(self) -> list[JobView]:
        """Jobs that ended while their work and other jobs of the run go on; none if in doubt."""
        alive = {job.name for job in self.jobs if job.is_alive}
        if self.snapshot.outage or not alive - {CARETAKER_JOB}:
            return []
        is_sft_over = self.paths.sft_export.exists()
        return [
            job
            for job in self.jobs
            if job.name not in alive
            and not (job.name == "sft" and is_sft_over)
            and not job.ended_idle
            and (job.slurm_record is None or job.has_failed)
        ]


def fetch_run_jobs(paths: RunPaths, queue: QueuePoller) -> RunJobs:
    answer = queue.poll_for_display(list_recorded_job_ids(paths))
    unrecorded: Sequence[LiveJob] = ()
    if has_slurm() and not answer.outage:
        with contextlib.suppress(ClusterError):  # no answer, or no cluster
            unrecorded = list_unrecorded_live_jobs(paths)
    return build_run_jobs(paths, answer, unrecorded)


def build_run_jobs(
    paths: RunPaths, answer: QueueSnapshot, unrecorded: Sequence[LiveJob] = ()
) -> RunJobs:
    submissions = read_submissions(paths.submissions)
    ids = tuple(dict.fromkeys(submission.job_id for submission in submissions))
    snapshot = answer.filter_jobs(ids, partial(is_job_of_run, paths))
    known = [answer.jobs[job_id] for job_id in ids if job_id in answer.jobs]
    original = find_run_of_jobs(paths, known)
    newest = get_latest_submissions(submissions)
    last_attempt = max((submission.attempt for submission in submissions), default=0)
    names = {
        name
        for name, submission in newest.items()
        # An earlier launch may have had more cells; a caretaker that is over is of no interest.
        if (submission.attempt == last_attempt and name != CARETAKER_JOB)
        or not (is_cell_job(name) or name == CARETAKER_JOB)
        or is_live_state(snapshot.get_state(submission.job_id))
    } or {path.name for path in paths.jobs_dir.glob("*") if paths.job(path.name).launch.exists()}
    jobs = tuple(
        JobView(
            name,
            newest.get(name),
            snapshot.jobs.get(newest[name].job_id) if name in newest else None,
            read_task_exits(paths.job(name)),
        )
        for name in sorted(names, key=_rank_job)
    )
    jobs += tuple(
        JobView(job.submission.job, job.submission, job.slurm_record, {}, is_recorded=False)
        for job in unrecorded
    )
    ids += tuple(job.slurm_record.job_id for job in unrecorded)
    return RunJobs(paths, jobs, snapshot, ids, original)


def _rank_job(job_name: str) -> tuple[bool, bool, bool, str, list[int]]:
    numbers = [int(number) for number in re.findall(r"\d+", job_name)]
    is_first, is_last = job_name == "sft", job_name == CARETAKER_JOB
    return is_last, not is_first, job_name != "trainer", re.sub(r"\d+", "", job_name), numbers


def get_run_state(run: RunJobs) -> str:
    """Return one or a few words: finished, running, waiting, ending, failed, cancelled, stopped.

    A run is leaderless while its trainer is gone for good and other jobs of it wait or run.
    """
    paths = run.paths
    alive = [job for job in run.jobs if job.is_alive]
    if paths.finished_marker.exists():
        return "finished"
    if paths.cancelled_marker.exists():
        return "being cancelled" if alive else "cancelled"
    if not alive and (note := find_live_launcher_note(paths)) is not None:
        return f"running in allocation {note.job_id}"
    if run.is_local:
        return "running here" if is_lock_held(paths.lock) else _describe_end_of_run(run)
    if {job.name for job in alive} == {CARETAKER_JOB}:
        return "waiting"  # the caretaker's job, which submits the others, is pending
    if alive:
        phases = {job.slurm_record.state.phase for job in alive if job.slurm_record}
        lost = {job.name for job in run.jobs_ended_before_run}
        if lost & LEADER_JOB_NAMES:
            return "leaderless"
        if run.jobs_ended_before_run and JobPhase.RUNNING in phases:
            return "running, short of cells"
        named = (("running", JobPhase.RUNNING), ("waiting", JobPhase.WAITING))
        return next((word for word, phase in named if phase in phases), "ending")
    return "unknown" if run.snapshot.outage else _describe_end_of_run(run)


def _describe_end_of_run(run: RunJobs) -> str:
    return "failed" if any(job.has_failed for job in run.jobs) else "stopped"


def describe_allocation_steps(paths: RunPaths) -> list[str]:
    if (note := find_live_launcher_note(paths)) is None or not note.steps:
        return []
    steps = [(step.job, step.step, ",".join(step.nodes)) for step in note.steps]
    return format_table([("job", "step", "nodes"), *steps])


def format_jobs(run: RunJobs) -> list[str]:
    rows = [("job", "id", "state", "nodes", "attempt", "time")]
    rows += [_format_job_row(job, run.snapshot) for job in run.jobs]
    lines = format_table(rows)
    for job in run.jobs:
        if job.slurm_record is None or job.slurm_record.state.phase is not JobPhase.WAITING:
            continue
        if job.waits_behind_others:
            continue
        if (reason := job.pending_reason) is not None:
            lines.append(f"{job.name} is pending: {reason.meaning}")
            if reason.hint:
                lines.append(f"  try: {reason.hint.replace('JOBID', job.slurm_record.job_id)}")
        else:
            lines.append(f"{job.name} {job.slurm_record.state.meaning}")
    lines += [
        f"{job.name} had nothing to do and released its nodes: a caretaker submits it when the "
        "jobs that it works with are there"
        for job in run.jobs
        if job.ended_idle
    ]
    lines += describe_unrecorded_jobs(run)
    if run.original is not None:
        lines.append(f"this folder is a copy of {run.original}, whose jobs are not its own")
    if run.snapshot.outage:
        lines.append(
            f"Slurm does not answer ({run.snapshot.outage}): states of jobs are unknown, and jobs "
            "that run are not affected"
        )
    return lines


def describe_unrecorded_jobs(run: RunJobs) -> list[str]:
    root, lines = shlex.quote(str(run.paths.root)), []
    for job in run.jobs:
        if job.is_recorded or job.submission is None:
            continue
        lines.append(
            f"job {job.submission.job_id} ({job.name}) is not on record: its "
            "submission was interrupted, or made by hand\n"
            f"  try: areal-hpc resume {root} takes it over, areal-hpc cancel {root} removes it"
        )
    return lines


def _format_job_row(job: JobView, snapshot: QueueSnapshot) -> tuple[str, str, str, str, str, str]:
    submission, queued = job.submission, job.slurm_record
    job_id = submission.job_id if submission else "-"
    attempt = str(submission.attempt) if submission else "-"
    if queued is not None:
        if queued.restarts:
            attempt += f", restart {queued.restarts}"
        state, nodes = format_slurm_state(queued), queued.nodes or "-"
        return (job.name, job_id, state, nodes, attempt, _format_job_times(queued))
    state = "unknown (no longer in Slurm's records)"
    if snapshot.outage:
        state = "? (Slurm does not answer)"
    elif codes := sorted({outcome.exit_code for outcome in job.task_exits.values()}):
        state = f"ended (exit code {', '.join(map(str, codes))})"
    return (job.name, job_id, state, "-", attempt, "-")


def format_slurm_state(queued_job: SlurmJobRecord) -> str:
    state = queued_job.state
    if state.phase is JobPhase.WAITING and queued_job.reason:
        return f"{state.name} ({queued_job.reason})"
    if queued_job.signal:
        return f"{state.name} (signal {queued_job.signal})"
    if queued_job.exit_code:
        return f"{state.name} (exit code {queued_job.exit_code})"
    return state.name


def _format_job_times(queued_job: SlurmJobRecord) -> str:
    now, end = time.time(), queued_job.ended_or_latest_end_at
    start = queued_job.started_or_expected_at
    match queued_job.state.phase:
        case JobPhase.WAITING:
            return f"expected at {format_time(start)}" if start else "start unknown"
        case JobPhase.RUNNING | JobPhase.ENDING if start:
            left = f", {format_duration(end - now)} left" if end and end > now else ""
            return f"for {format_duration(now - start)}{left}"
        case JobPhase.OVER if end:
            return f"ended at {format_time(end)}"
    return "-"
