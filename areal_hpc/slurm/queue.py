"""Job states from squeue and sacct, polled with backoff.

squeue lists the jobs that wait, run or ended a few minutes ago (slurm.conf's MinJobAge). With
accounting, sacct lists older jobs and the starts before a requeue. scontrol would add nothing to a
job's state: it reads the same memory as squeue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmTimeoutError
from areal_hpc.slurm.commands import build_comma_lists, parse_slurm_timestamp, run_slurm_command
from areal_hpc.slurm.states import (
    UNKNOWN_STATE,
    JobPhase,
    JobState,
    parse_canceller,
    parse_exit_status,
    parse_state,
)
from areal_hpc.wire.retry import Backoff

SQUEUE_COLUMNS = (
    ("JobID", 20),
    ("State", 30),
    ("Reason", 200),
    ("NodeList", 1000),
    ("StartTime", 30),
    ("EndTime", 30),
    ("RestartCnt", 10),
    ("exit_code", 12),
    ("Name", 400),
    ("Comment", 1000),
)
"""Name and width of each column; squeue cuts longer values."""
SACCT_COLUMNS = ("JobID", "State", "ExitCode", "NodeList", "Start", "End", "Reason")
_SQUEUE_ARGUMENTS = (
    *("--noheader", "--all", "--states=all"),
    "--Format=" + ",".join(f"{name}:{width}|" for name, width in SQUEUE_COLUMNS),
)
SLURM_OUTAGE_BACKOFF = Backoff(2.0, 60.0)
"""Pauses between calls to a Slurm that does not answer."""
ACCOUNTING_RETRY_INTERVAL_S = 60.0
"""Time between two calls of sacct while accounting is off."""


@dataclass(frozen=True, slots=True)
class SlurmJobRecord:
    """Slurm's record of a job, or of one start of it."""

    job_id: str
    state: JobState
    reason: str = ""
    nodes: str = ""
    started_or_expected_at: float | None = None
    """Unix time of the actual or expected start; None if unknown."""
    ended_or_latest_end_at: float | None = None
    """Unix time of the end, or of the latest possible end; None if unknown."""
    restarts: int | None = None
    """Number of earlier starts; None if unknown."""
    exit_code: int = 0
    signal: int = 0
    """Signal that ended the job; 0 for none."""
    name: str = ""
    comment: str = ""
    """Name and comment are empty if unknown."""
    cancelled_by: int | None = None
    """Id of the user who cancelled the job; None if accounting does not record it."""
    failed_step_states: tuple[str, ...] = ()
    """States of failed steps, such as `OUT_OF_MEMORY`, which the job's own state may hide."""

    @property
    def names(self) -> str:
        return f"{self.name} {self.comment}".strip()


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """States of many jobs at one time."""

    jobs: dict[str, SlurmJobRecord] = field(default_factory=dict)
    """Records by job id; unknown jobs are absent."""
    outage: str = ""
    """Reason why Slurm did not answer; empty if it did."""

    def filter_jobs(
        self, job_ids: Iterable[str], is_own: Callable[[SlurmJobRecord], bool]
    ) -> QueueSnapshot:
        """Select the jobs with these ids that belong to a run."""
        jobs = {
            job_id: job
            for job_id in job_ids
            if (job := self.jobs.get(job_id)) is not None and is_own(job)
        }
        return QueueSnapshot(jobs, self.outage)

    def get_state(self, job_id: str) -> JobState:
        job = self.jobs.get(job_id)
        return job.state if job else UNKNOWN_STATE


def parse_squeue(text: str) -> list[SlurmJobRecord]:
    """Parse squeue's output in `SQUEUE_COLUMNS`."""
    return [
        _parse_squeue_row([cell.strip() for cell in line.split("|")])
        for line in text.splitlines()
        if line.count("|") >= len(SQUEUE_COLUMNS)
    ]


def _parse_squeue_row(cells: Sequence[str]) -> SlurmJobRecord:
    job_id, state, reason, nodes, start, end, restarts, exit_status, name, *rest = cells[:-1]
    exit_code, signal = parse_exit_status(exit_status)
    return SlurmJobRecord(
        job_id=job_id,
        state=parse_state(state),
        reason="" if reason in {"None", "(null)"} else reason,
        nodes=nodes,
        started_or_expected_at=parse_slurm_timestamp(start),
        ended_or_latest_end_at=parse_slurm_timestamp(end),
        restarts=int(restarts) if restarts.isdigit() else None,
        exit_code=exit_code,
        signal=signal,
        name=name,
        comment="|".join(rest),
    )


def parse_sacct(text: str) -> list[SlurmJobRecord]:
    """Parse every start of every job in sacct's order (-D -n -P, in `SACCT_COLUMNS`).

    The rows of steps (`17.batch`, `17.0`) follow the row of their job. Their failures are added to
    the job, because a step may run out of memory in a job that merely `FAILED`.
    """
    jobs: list[SlurmJobRecord] = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < len(SACCT_COLUMNS):
            continue
        name, _, step = cells[0].partition(".")
        state = parse_state(cells[1])
        if not step:
            jobs.append(_parse_sacct_row(name, state, cells))
        elif (
            jobs and state.is_over_without_success and state.name not in jobs[-1].failed_step_states
        ):
            jobs[-1] = replace(
                jobs[-1], failed_step_states=(*jobs[-1].failed_step_states, state.name)
            )
    return jobs


def _parse_sacct_row(job_id: str, state: JobState, cells: Sequence[str]) -> SlurmJobRecord:
    code, _, signal = cells[2].partition(":")
    return SlurmJobRecord(
        job_id=job_id,
        state=state,
        reason="" if cells[6] in {"None", ""} else cells[6],
        nodes="" if cells[3] == "None assigned" else cells[3],
        started_or_expected_at=parse_slurm_timestamp(cells[4]),
        ended_or_latest_end_at=parse_slurm_timestamp(cells[5]),
        exit_code=int(code) if code.isdigit() else 0,
        signal=int(signal) if signal.isdigit() else 0,
        cancelled_by=parse_canceller(cells[1]),
    )


class QueuePoller:
    """Poller of Slurm's job states that backs off while Slurm does not answer."""

    def __init__(self) -> None:
        self._unanswered_polls = 0
        self._ask_accounting_at = 0.0
        """Monotonic time before which sacct, which failed, is not called again."""
        self._settled: dict[str, SlurmJobRecord] = {}
        """Final records of jobs that squeue has forgotten and sacct has not."""

    @property
    def pause_s(self) -> float:
        return SLURM_OUTAGE_BACKOFF.get_pause_s(self._unanswered_polls)

    def poll(self, job_ids: Iterable[str]) -> QueueSnapshot:
        """Query these jobs now. An outage of Slurm raises nothing: the snapshot reports it."""
        wanted = sorted(set(job_ids))
        if not wanted:
            return QueueSnapshot()
        outage = ""
        jobs: dict[str, SlurmJobRecord] = {}
        try:
            jobs = {job.job_id: job for job in query_squeue(wanted)}
            self._unanswered_polls = 0
        except SlurmTimeoutError as error:
            outage = error.problems[0].message
            self._unanswered_polls += 1
        missing = [job_id for job_id in wanted if job_id not in jobs]
        past = {job.job_id: job for job in self.read_accounting(set(missing) - set(self._settled))}
        # Accounting lags behind slurmctld, and reports a job whose end it missed as running for
        # ever, so only its records of ended jobs count.
        past = {key: job for key, job in past.items() if not is_live_state(job.state)}
        if not outage:
            self._settled |= past
        jobs |= past | {key: self._settled[key] for key in missing if key in self._settled}
        return QueueSnapshot(jobs, outage)

    def poll_for_display(self, job_ids: Iterable[str]) -> QueueSnapshot:
        """Poll like `poll`, but report an error of squeue as an outage, too."""
        try:
            return self.poll(job_ids)
        except ClusterError as error:
            # The last line is the reason; the lines above list squeue's attempts.
            return QueueSnapshot(outage=error.problems[0].message.splitlines()[-1])

    def read_accounting(self, job_ids: Iterable[str]) -> list[SlurmJobRecord]:
        """Read every start of these jobs from accounting, oldest first; none while it is off."""
        if time.monotonic() < self._ask_accounting_at:
            return []
        columns = ",".join(SACCT_COLUMNS)
        jobs: list[SlurmJobRecord] = []
        try:
            for ids in build_comma_lists(sorted(set(job_ids))):
                arguments = ("--noheader", "--parsable2", "--duplicates", f"--format={columns}")
                jobs += parse_sacct(run_slurm_command("sacct", *arguments, f"--jobs={ids}"))
        except SlurmTimeoutError:
            return []  # the next poll calls it again
        except ClusterError:  # it is off, or there is no sacct on this machine
            self._ask_accounting_at = time.monotonic() + ACCOUNTING_RETRY_INTERVAL_S
            return []
        return jobs


def query_live_job_ids(job_ids: Iterable[str]) -> list[str]:
    """Select the jobs that wait or run."""
    return [job.job_id for job in query_squeue(sorted(set(job_ids))) if is_live_state(job.state)]


def query_squeue_of_user(user_id: int) -> list[SlurmJobRecord]:
    """Query a user's jobs that slurmctld remembers."""
    return parse_squeue(run_slurm_command("squeue", *_SQUEUE_ARGUMENTS, f"--user={user_id}"))


def query_squeue(job_ids: Sequence[str]) -> list[SlurmJobRecord]:
    """Query those of the jobs that slurmctld remembers."""
    jobs: list[SlurmJobRecord] = []
    for ids in build_comma_lists(job_ids):
        try:
            jobs += parse_squeue(run_slurm_command("squeue", *_SQUEUE_ARGUMENTS, f"--jobs={ids}"))
        except SlurmCommandError as error:
            # squeue fails for a single job that it has forgotten, but not for one among several.
            if "invalid job id" not in str(error).lower():
                raise
    return jobs


def is_live_state(state: JobState) -> bool:
    return state.phase in (JobPhase.WAITING, JobPhase.RUNNING, JobPhase.ENDING)
