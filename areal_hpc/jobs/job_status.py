"""Status of a run's jobs under Slurm, and the selection of those that a caretaker watches."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.requeue import read_progress_bytes
from areal_hpc.recipe.base import BaseConfig
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    IDLE_EXIT_CODE,
    SlurmLaunchInfo,
    Submission,
    TaskExit,
    get_latest_submissions,
    read_launch_file,
    read_submissions,
    read_task_exits,
)
from areal_hpc.rundir.paths import JobPaths, RunPaths
from areal_hpc.slurm.queue import QueuePoller, SlurmJobRecord, is_live_state, query_squeue_of_user
from areal_hpc.slurm.run_jobs import (
    is_job_of_run,
    list_unrecorded_live_jobs,
    was_cancelled_by_person,
)
from areal_hpc.slurm.scontrol import expand_node_list
from areal_hpc.slurm.states import UNKNOWN_STATE, JobPhase, JobState, is_held_after_failed_launch
from areal_hpc.wire.decoding import decode_json

MAX_SUBMISSIONS_WITHOUT_PROGRESS = 3
"""Submissions of a job without progress of the run, after which a person has to resume it."""
MAX_JOB_LIFETIME_TO_BLAME_NODE_S = 60.0
"""Lifetime from which on the node is not to blame for a job whose tasks reported nothing."""
MAX_EXIT_FILE_DELAY_S = 30.0
"""Time until a node sees another node's file: storage caches folders."""


class StageJobs(BaseConfig):
    leader: str
    others: tuple[str, ...]
    done_marker: Path
    """File whose existence means that the stage needs no jobs."""

    @property
    def jobs(self) -> tuple[str, ...]:
        return (self.leader, *self.others)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of a job's newest submission."""

    name: str
    submission: Submission | None
    """None if the job was never submitted."""
    slurm_record: SlurmJobRecord | None
    """Slurm's record; None if Slurm does not list the job."""
    task_exits: tuple[TaskExit, ...]
    """Last exits of its tasks."""
    is_alive: bool
    cancelled_by_person: bool = False
    is_given_up: bool = False
    """Whether caretakers have submitted it as often as allowed without progress of the run."""

    @property
    def state(self) -> JobState:
        return self.slurm_record.state if self.slurm_record else UNKNOWN_STATE

    @property
    def is_running(self) -> bool:
        return self.state.phase is JobPhase.RUNNING

    @property
    def is_held_after_failed_launch(self) -> bool:
        record = self.slurm_record
        return record is not None and is_held_after_failed_launch(record.reason)

    @property
    def ended_idle(self) -> bool:
        """Whether it released its nodes because the jobs that it works with were missing."""
        codes = {task_exit.exit_code for task_exit in self.task_exits}
        has_crashed = any(task_exit.is_crash for task_exit in self.task_exits)
        return IDLE_EXIT_CODE in codes and not has_crashed

    @property
    def reason_to_submit(self) -> str:
        """Reason to submit it again, a predicate of the job's name; empty if there is none."""
        is_decided = self.name != CARETAKER_JOB and any(
            task_exit.exit_code == 0 or task_exit.gave_up for task_exit in self.task_exits
        )
        if self.is_alive or is_decided or self.cancelled_by_person or self.is_given_up:
            return ""
        if self.submission is None:
            return "was never submitted"
        if self.slurm_record is not None and self.state.phase is JobPhase.UNKNOWN:
            return ""  # a newer Slurm lists it in an unknown state
        ended_at = (self.slurm_record and self.slurm_record.ended_or_latest_end_at) or 0.0
        if self.state.name == "COMPLETED" and time.time() - ended_at < MAX_EXIT_FILE_DELAY_S:
            return ""  # the exits of its tasks may not be visible yet
        return "had released its nodes" if self.ended_idle else self.state.meaning

    @property
    def faulty_node(self) -> str:
        """Node that ended the job before a task reported anything; empty if there is none."""
        record = self.slurm_record
        has_ended = self.state.name in ("FAILED", "COMPLETED")
        if record is None or self.task_exits or not record.nodes or not has_ended:
            return ""
        lived_s = (record.ended_or_latest_end_at or 0.0) - (record.started_or_expected_at or 0.0)
        return (
            expand_node_list(record.nodes)[0] if lived_s < MAX_JOB_LIFETIME_TO_BLAME_NODE_S else ""
        )


def select_jobs_to_watch(
    own_job: str, stages: Sequence[StageJobs], jobs: Mapping[str, JobStatus]
) -> list[str]:
    """Select the jobs that the caretaker of `own_job` has to watch now, in order.

    A caretaker outside the run's jobs leaves out stages whose leading job stays away, and idle jobs
    while the jobs that they work with wait in the queue.
    """
    waiting_job = [name for name in jobs if name == CARETAKER_JOB]
    if own_job == CARETAKER_JOB:
        selected: list[str] = []
        for stage in stages:
            leader = jobs[stage.leader]
            if not (leader.is_alive or leader.reason_to_submit):
                break
            for name in stage.jobs:
                partners = stage.others if name == stage.leader else (stage.leader,)
                is_partner_queued = not any(
                    jobs[partner].is_running for partner in partners
                ) and any(jobs[partner].is_alive for partner in partners)
                selected += [] if jobs[name].ended_idle and is_partner_queued else [name]
        return [*selected, *waiting_job]
    (stage,) = stages
    if own_job == stage.leader:
        return [*stage.others, *waiting_job]
    leader = jobs[stage.leader]
    if leader.is_alive and not leader.is_held_after_failed_launch:
        return []
    first = next((name for name in stage.others if jobs[name].is_running), "")
    return [stage.leader] if first == own_job else []


class JobStatusReader:
    """Reader of a run's newest submissions, their records in Slurm and the exits of their tasks."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self.queue = QueuePoller()

    def read(self, names: Sequence[str]) -> dict[str, JobStatus]:
        submissions = read_submissions(self._paths.submissions)
        latest = get_latest_submissions(submissions)
        newest = {name: latest[name] for name in names if name in latest}
        ids = [submission.job_id for submission in newest.values()]
        snapshot = self.queue.poll(ids).filter_jobs(ids, partial(is_job_of_run, self._paths))
        if snapshot.outage:
            raise ClusterError(snapshot.outage)
        alive = {
            name
            for name, submission in newest.items()
            if is_live_state(snapshot.get_state(submission.job_id))
        }
        if not alive.issuperset(names):  # a second query only if jobs are missing
            alive |= self._find_renumbered_jobs(submissions)
        return {
            name: self._read_status(name, newest.get(name), snapshot.jobs, name in alive)
            for name in names
        }

    def _find_renumbered_jobs(self, submissions: list[Submission]) -> set[str]:
        queued = query_squeue_of_user(self._paths.root.stat().st_uid)
        at_work = {
            job.job_id
            for job in queued
            if job.state.phase in (JobPhase.WAITING, JobPhase.RUNNING)
            and is_job_of_run(self._paths, job)
        }
        # Of two jobs that were submitted at the same time the older one may be the one that runs.
        recorded = {submission.job for submission in submissions if submission.job_id in at_work}
        unrecorded = list_unrecorded_live_jobs(self._paths, queued)
        return recorded | {live.submission.job for live in unrecorded}

    def _read_status(
        self,
        job_name: str,
        submission: Submission | None,
        queued_jobs: Mapping[str, SlurmJobRecord],
        is_alive: bool,
    ) -> JobStatus:
        if submission is None:
            return JobStatus(job_name, None, None, (), is_alive)
        files, record = self._paths.job(job_name), queued_jobs.get(submission.job_id)
        exits = read_task_exits(files).values()
        own = tuple(
            task_exit
            for task_exit in exits
            if task_exit.incarnation.rpartition(".")[0] == submission.job_id
        )
        by_person = self._was_cancelled_by_person(submission, record)
        is_given_up = not is_alive and count_submissions(files) > MAX_SUBMISSIONS_WITHOUT_PROGRESS
        return JobStatus(job_name, submission, record, own, is_alive, by_person, is_given_up)

    def _was_cancelled_by_person(
        self, submission: Submission, queued: SlurmJobRecord | None
    ) -> bool:
        note = self._paths.job(submission.job).cancelled_id
        is_noted = note.exists() and note.read_text() == submission.job_id
        if queued is None:
            return is_noted
        owner_id = self._paths.root.stat().st_uid
        by_person = was_cancelled_by_person(queued, self.queue, owner_id)
        with contextlib.suppress(OSError):  # on a full disk the next look tries again
            if by_person and not is_noted:
                write_atomic(note, submission.job_id.encode())
            elif is_noted and not by_person:  # accounting was late, or the job runs again
                note.unlink(missing_ok=True)
        return by_person


def read_slurm_info(job: JobPaths) -> SlurmLaunchInfo:
    info = read_launch_file(job.launch).slurm
    assert info is not None
    return info


def count_submissions(job: JobPaths) -> int:
    """Count the submissions by caretakers since the run made progress."""
    with contextlib.suppress(FileNotFoundError):
        before = decode_json(job.caretaker_submission_count.read_bytes(), dict[str, int])
        is_current = before["progress_bytes"] == read_progress_bytes(read_slurm_info(job).progress)
        return before["submissions"] if is_current else 0
    return 0


def write_submission_count(job: JobPaths, count: int) -> None:
    progress_bytes = read_progress_bytes(read_slurm_info(job).progress)
    content = {"submissions": count, "progress_bytes": progress_bytes}
    write_atomic(job.caretaker_submission_count, msgspec.json.encode(content))
