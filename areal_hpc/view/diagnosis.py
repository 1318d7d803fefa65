"""Diagnosis of a failed or waiting run (`areal-hpc why`)."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from areal_hpc.errors import RecipeError, escape_line
from areal_hpc.metrics.step_line import describe_training
from areal_hpc.rundir.telemetry.events import (
    LAUNCHER_ENDED_EVENT,
    LAUNCHER_ROLE,
    SUBMISSION_REFUSED_EVENT,
)
from areal_hpc.slurm.queue import SlurmJobRecord
from areal_hpc.slurm.states import JobPhase, explain_reason, find_error_time
from areal_hpc.view.events import (
    LOGS_HINT,
    MAX_TRACEBACK_LINES,
    MEMORY_HINT,
    FailureEvent,
    build_agent_failure_events,
    collect_failure_events,
    describe_exit_code,
)
from areal_hpc.view.formatting import format_duration, format_time
from areal_hpc.view.state.jobs import LEADER_JOB_NAMES, format_slurm_state
from areal_hpc.view.state.run_view import LogTraceback, RunView, TaskExitRecord

MAX_CASCADE_GAP_S = 120.0
"""Seconds in which a further failure belongs to the one before: broken collectives, jobs without
their trainer."""
MAX_RUNNING_CASCADE_GAP_S = 30.0
RECOVERED_AFTER_S = 60.0
MIN_STEPS_WITHOUT_PROGRESS = 5
MIN_TIME_WITHOUT_PROGRESS_S = 300.0
MIN_FREE_DISK_BYTES = 256 << 20
_OOM_PATTERN = re.compile(r"oom[-_ ]kill|out of memory|OutOfMemoryError|MemoryError", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    headline: str
    chain: tuple[FailureEvent, ...] = ()
    """Events of the last failure, oldest first."""
    hint: str = ""
    is_well: bool = False
    notes: tuple[str, ...] = ()


def diagnose(view: RunView) -> Diagnosis:
    diagnosis = _diagnose_state(view)
    if not diagnosis.is_well or not view.failure_alerts:
        return diagnosis
    worst = view.failure_alerts[0]
    return replace(
        diagnosis,
        headline=f"{diagnosis.headline}; but {worst.message}",
        hint=worst.hint,
        is_well=False,
    )


def describe_reason(view: RunView) -> list[str]:
    """Return the line of a run's state that says why the run ended, if it did not end well."""
    if view.state not in ("failed", "stopped", "leaderless"):
        return []
    diagnosis = diagnose(view)
    reason = diagnosis.headline.removeprefix(f"the run {view.state}: ")
    return [f"  reason            {escape_line(reason)}"] if diagnosis.chain else []


def _diagnose_state(view: RunView) -> Diagnosis:
    state = view.state
    within_s = MAX_RUNNING_CASCADE_GAP_S if state.startswith("running") else MAX_CASCADE_GAP_S
    findings = sorted(_collect_failure_events(view), key=lambda finding: finding.at or 0.0)
    chain = find_last_failure_chain(findings, within_s)
    cause = min(chain, key=lambda finding: finding.distance_from_cause) if chain else None
    if state == "finished":
        headline = "the run is finished: every step was trained"
        return Diagnosis(headline, is_well=True, notes=tuple(describe_training(view.steps)))
    if state in ("cancelled", "being cancelled"):
        headline = f"the run was {state} with areal-hpc cancel"
        return Diagnosis(headline, hint="areal-hpc resume RUN continues it", is_well=True)
    if state == "unknown":
        headline = f"Slurm does not answer ({view.jobs.snapshot.outage})"
        if cause is not None:
            headline += f"; the last failure on record: {cause.text}"
        return Diagnosis(headline, chain, "scontrol ping")
    if view.jobs.jobs_ended_before_run:
        return _diagnose_lost_jobs(view, state, chain, cause)
    waiting = _diagnose_waiting(view, chain)
    if state == "waiting" and waiting is not None:
        return waiting
    if state.startswith("running"):
        if waiting is not None and not waiting.is_well:
            return replace(waiting, headline=f"the run is running, but {waiting.headline}")
        if (delay := _diagnose_stall(view, chain)) is not None:
            return delay
        return _diagnose_running(view, chain, cause)
    if state == "stopped" and (stop := _diagnose_local_stop(view, chain)) is not None:
        return stop
    if cause is None:
        return Diagnosis(f"the run is {state}; it left no error message", hint=LOGS_HINT)
    return Diagnosis(f"the run {state}: {cause.text}", chain, cause.hint)


def _diagnose_running(
    view: RunView, failure_chain: tuple[FailureEvent, ...], cause: FailureEvent | None
) -> Diagnosis:
    failures = view.agent_failures
    if failures.is_agent_always_failing and failures.newest is not None:
        headline = f"the run is running, but its agent fails {failures.share_text}"
        hint = f"{failures.newest.suggested_fix}, then run the same command again"
        return Diagnosis(f"{headline}: {failures.newest.text}", failure_chain, hint)
    happened = "and nothing has failed"
    if cause is not None:
        happened, last_at = f"after this: {cause.text}", failure_chain[-1].at
        if view.pace and last_at and view.pace.last_at - last_at > RECOVERED_AFTER_S:
            ago = format_duration(time.time() - last_at)
            happened = f"and has trained steps since this, {ago} ago: {cause.text}"
    headline = f"the run is running, {happened}"
    notes = tuple(describe_training(view.steps))
    return Diagnosis(headline, failure_chain, is_well=True, notes=notes)


def _diagnose_local_stop(
    view: RunView, failure_chain: tuple[FailureEvent, ...]
) -> Diagnosis | None:
    launcher_rows = [row for row in view.events if row["role"] == LAUNCHER_ROLE]
    was_any_refused = any(row["event"] == SUBMISSION_REFUSED_EVENT for row in launcher_rows)
    if not view.jobs.is_local or was_any_refused or not launcher_rows:
        return None
    ends = [row for row in launcher_rows if row["event"] == LAUNCHER_ENDED_EVENT]
    hint = "run the same command again to resume from the last checkpoint"
    if not ends:
        headline = "the launcher was killed, or its machine went down; its jobs stopped with it"
        return Diagnosis(headline, failure_chain, hint)
    if reason := ends[-1].get("reason"):
        hint = "run the same command in a new allocation to resume from the last checkpoint"
        return Diagnosis(f"the run was stopped: {reason}", failure_chain, hint, is_well=True)
    signal_name = ends[-1].get("signal")
    if not signal_name:
        return None
    stopped_by = "Ctrl-C" if signal_name == "SIGINT" else signal_name
    return Diagnosis(f"the run was stopped by {stopped_by}", failure_chain, hint, is_well=True)


def _diagnose_lost_jobs(
    view: RunView, state: str, failure_chain: tuple[FailureEvent, ...], cause: FailureEvent | None
) -> Diagnosis:
    lost = [
        f"{job.name} (job {job.submission.job_id if job.submission else '?'}) "
        f"{job.slurm_record.state.meaning if job.slurm_record else 'is no longer known to Slurm'}"
        for job in view.jobs.jobs_ended_before_run
    ]
    hint = (
        "areal-hpc resume RUN submits what is missing; "
        "the run does so itself within some minutes unless a person ended the job or it gave up"
    )
    why = f", after this: {cause.text}" if cause else ""
    first = f"{cause.hint}; then " if cause and cause.hint else ""
    return Diagnosis(f"the run is {state}: {'; '.join(lost)}{why}", failure_chain, first + hint)


def _diagnose_stall(view: RunView, failure_chain: tuple[FailureEvent, ...]) -> Diagnosis | None:
    suspended = [
        (job.name, job.slurm_record)
        for job in view.jobs.jobs
        if job.slurm_record and job.slurm_record.state.name in ("SUSPENDED", "STOPPED")
    ]
    if suspended:
        descriptions = "; ".join(
            f"{name} (job {queued.job_id}) {queued.state.meaning}" for name, queued in suspended
        )
        ids = ",".join(queued.job_id for _, queued in suspended)
        hint = f"scontrol resume {ids} if a person suspended it; else it waits for other jobs"
        return Diagnosis(f"the run is stalled: {descriptions}", failure_chain, hint)
    if view.free_bytes is not None and view.free_bytes < MIN_FREE_DISK_BYTES:
        free = f"{view.free_bytes / 2**20:.0f} MiB are free in {view.jobs.paths.root}"
        return Diagnosis(f"the run is running, but only {free}", failure_chain, "make room there")
    leader = next(
        (job for job in view.jobs.jobs if job.name in LEADER_JOB_NAMES and job.is_alive), None
    )
    if view.pace is None or leader is None or leader.slurm_record is None:
        return None
    began_at = max(view.pace.last_at, leader.slurm_record.started_or_expected_at or 0.0)
    silent_s, usual_s = time.time() - began_at, view.pace.median_s
    if silent_s < max(MIN_STEPS_WITHOUT_PROGRESS * usual_s, MIN_TIME_WITHOUT_PROGRESS_S):
        return None
    headline = (
        f"the run is stalled: no step for {format_duration(silent_s)}, "
        f"where one takes {format_duration(usual_s)}"
    )
    return Diagnosis(
        headline, failure_chain, "areal-hpc logs RUN shows what its processes wait for"
    )


_HELD_JOB_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


def _diagnose_waiting(view: RunView, failure_chain: tuple[FailureEvent, ...]) -> Diagnosis | None:
    reasons = [
        (job.name, job.slurm_record, job.pending_reason or explain_reason(job.slurm_record.reason))
        for job in view.jobs.jobs
        if job.slurm_record and job.slurm_record.state.phase is JobPhase.WAITING
        if not job.waits_behind_others
    ]
    if not reasons:
        return None
    # Jobs on which a person has to act come first, then those that wait for more than other jobs.
    name, queued, reason = min(
        reasons, key=lambda item: (not item[2].needs_action, item[1].reason == "Dependency")
    )
    start = (
        f"; Slurm expects it to start at {format_time(queued.started_or_expected_at)}"
        if queued.started_or_expected_at
        else ""
    )
    held = queued.state.name in _HELD_JOB_STATES
    description = queued.state.meaning if held else f"is pending: {reason.meaning}"
    return Diagnosis(
        f"{name} (job {queued.job_id}) {description}{start}",
        failure_chain,
        reason.hint.replace("JOBID", queued.job_id),
        is_well=not (reason.needs_action or held),
    )


def find_last_failure_chain(
    findings: Sequence[FailureEvent], max_gap_s: float
) -> tuple[FailureEvent, ...]:
    chain: list[FailureEvent] = []
    for finding in reversed(findings):
        next_at = chain[-1].at if chain else None
        if finding.at is not None and next_at is not None and next_at - finding.at > max_gap_s:
            break
        chain.append(finding)
    return tuple(reversed(chain))


def _collect_failure_events(view: RunView) -> Iterator[FailureEvent]:
    yield from _collect_slurm_events(view)
    for stack in view.tracebacks[:1]:
        yield _build_traceback_event(stack, len(view.tracebacks))
    first_at = (view.tracebacks[0].at or 0.0) if view.tracebacks else None
    yield from collect_failure_events(view.events, first_at)
    end_reasons = [record.outcome.reason for record in view.task_exits if record.outcome.is_crash]
    yield from build_agent_failure_events(view.agent_failures, end_reasons)
    for row in view.events:
        if row["event"] == SUBMISSION_REFUSED_EVENT:
            yield _build_refusal_event(row)
    shown_lines = {stack.lines[-1] for stack in view.tracebacks[:1]}
    for record in view.task_exits:
        if record.outcome.is_crash:
            reason = record.outcome.reason.strip().splitlines()
            new_lines = [] if shown_lines.intersection(reason[-1:]) else reason
            yield _build_task_exit_event(record, new_lines, is_local=view.jobs.is_local)
            shown_lines.update(reason[-1:])  # other tasks of a job repeat the decisive error
    for row in view.excluded_nodes:
        yield FailureEvent(
            row.get("at"),
            f"node {row['node']} failed its check: {row['reason']}",
            distance_from_cause=1,
            hint=f"tell the administrators about {row['node']}; the run leaves it out",
        )


def _collect_slurm_events(view: RunView) -> Iterator[FailureEvent]:
    names = {job.submission.job_id: job.name for job in view.jobs.jobs if job.submission}
    reported = {(start.job_id, start.ended_or_latest_end_at) for start in view.starts_in_accounting}
    for start in view.starts_in_accounting:
        if start.state.is_over_without_success:
            # Accounting keeps the pending reason of a job that has run since.
            shown = replace(start, reason="") if start.nodes else start
            yield _build_state_event(names.get(start.job_id, start.job_id), shown)
    end_by_job: dict[str, float | None] = {}
    for job in view.jobs.jobs:
        queued = job.slurm_record
        if (
            queued
            and queued.state.is_over_without_success
            and (queued.job_id, queued.ended_or_latest_end_at) not in reported
        ):
            yield _build_state_event(job.name, queued)
        if queued and job.ended_before_its_tasks:
            yield FailureEvent(
                queued.ended_or_latest_end_at,
                f"{job.name} (job {queued.job_id}) ended with code 0, but none of its tasks did",
                distance_from_cause=2,
                hint="cluster.slurm.setup ends it, or its container: see areal-hpc logs RUN",
            )
        if queued and not job.is_alive:  # else its end is that of its time limit
            end_by_job[job.name] = queued.ended_or_latest_end_at
    for name, line in view.slurm_lines:
        at = find_error_time(line) or end_by_job.get(name)
        if _OOM_PATTERN.search(line):
            yield FailureEvent(at, f"{name} ran out of memory", 0, (line,), MEMORY_HINT)
        else:
            # Slurm writes CANCELLED AT for every job that it ends.
            priority = 9 if "CANCELLED AT" in line else 6
            yield FailureEvent(at, f"Slurm reported in the output of {name}: {line}", priority)


_HINT_BY_STATE = {
    "OUT_OF_MEMORY": MEMORY_HINT,
    "TIMEOUT": "areal-hpc resume RUN continues from the last checkpoint; a longer time limit "
    "avoids this",
    "DEADLINE": "submit again without that deadline",
    "NODE_FAIL": "areal-hpc resume RUN, if Slurm does not bring the job back by itself",
    "BOOT_FAIL": "exclude that node, then areal-hpc resume RUN",
    "PREEMPTED": "areal-hpc resume RUN, if Slurm does not bring the job back by itself",
    "CANCELLED": "areal-hpc resume RUN continues from the last checkpoint",
}


def _build_refusal_event(row: Mapping[str, Any]) -> FailureEvent:
    head, *message_lines = str(row.get("reason") or "Slurm refused a job").splitlines()
    last = f" {message_lines[-1].removeprefix('sbatch: error: ')}" if message_lines else ""
    by_launcher = row.get("role") == "launcher"
    hint = f"{row.get('hint')}; then areal-hpc resume RUN, with key=value for what must change"
    return FailureEvent(
        row["time"],
        head + last if by_launcher else f"{row.get('job')}: {head}{last}",
        # A job's own failure is nearer to the cause than the refusal to submit it again.
        distance_from_cause=1 if by_launcher else 4,
        details=tuple(message_lines[:-1]),
        hint=hint if row.get("hint") else "areal-hpc resume RUN, once Slurm takes the job",
    )


def _build_state_event(job_name: str, start: SlurmJobRecord) -> FailureEvent:
    state = start.state
    out_of_memory = state.name == "OUT_OF_MEMORY" or "OUT_OF_MEMORY" in start.failed_step_states
    meaning = "used more memory than it had asked for" if out_of_memory else state.meaning
    nodes = f" on {start.nodes}" if start.nodes else ""
    # FAILED only repeats an exit code, and a job is also cancelled because another one failed.
    priority = 0 if out_of_memory else {"FAILED": 7, "CANCELLED": 6}.get(state.name, 2)
    reason = f", {start.reason}" if start.reason and start.reason != "NonZeroExitCode" else ""
    return FailureEvent(
        start.ended_or_latest_end_at,
        f"{job_name} (job {start.job_id}){nodes} {meaning}: {format_slurm_state(start)}{reason}",
        distance_from_cause=priority,
        hint=MEMORY_HINT if out_of_memory else _HINT_BY_STATE.get(state.name, ""),
    )


def _build_traceback_event(stack: LogTraceback, count: int) -> FailureEvent:
    shown = tuple(line for line in stack.lines if '"<frozen ' not in line)
    if len(shown) > MAX_TRACEBACK_LINES:
        shown = (shown[0], "  ...", *shown[-(MAX_TRACEBACK_LINES - 2) :])
    more = f" (the first of {count} tracebacks)" if count > 1 else ""
    is_oom = _OOM_PATTERN.search(stack.lines[-1]) is not None
    return FailureEvent(
        stack.at,
        f"{stack.file.source} raised {stack.lines[-1].strip()[:300]}{more}",
        distance_from_cause=0 if is_oom else 3,
        details=(*shown, f"at: {stack.file.path}"),
        hint=MEMORY_HINT if is_oom else f"read {stack.file.path}",
    )


def _build_task_exit_event(
    exit_record: TaskExitRecord, reason: Sequence[str], *, is_local: bool
) -> FailureEvent:
    outcome = exit_record.outcome
    distance, hint = 4, f"read {outcome.log}" if outcome.log else "areal-hpc logs RUN"
    if outcome.exit_code == RecipeError.exit_code:
        retry = "run the same command again" if is_local else "areal-hpc resume RUN key=value"
        distance, hint = 1, f"change the recipe as the message says, then {retry}"
    if outcome.says_why and reason:
        text, reason = f"{exit_record.job}: {reason[0].strip()}", reason[1:]
    else:
        process = outcome.process or "the supervisor"
        exit_text = describe_exit_code(outcome.exit_code)
        text = f"task {exit_record.rank} of {exit_record.job} failed: {process}: {exit_text}"
    return FailureEvent(exit_record.at, text, distance, tuple(reason[-MAX_TRACEBACK_LINES:]), hint)


def format_diagnosis(diagnosis: Diagnosis, run: str) -> list[str]:
    lines = [diagnosis.headline, *(f"  {note}" for note in diagnosis.notes)]
    for text, alike in groupby(diagnosis.chain, key=lambda finding: finding.text):
        first, *others = alike
        when = format_time(first.at) if first.at is not None else "at an unknown time"
        count = f" ({len(others) + 1} times)" if others else ""
        lines.append(f"  {when}  {text}{count}")
        lines += [f"      {detail}" for detail in first.details]
    if diagnosis.hint:
        lines.append(f"try: {diagnosis.hint.replace('RUN', run)}")
    return [escape_line(line) for line in lines]
