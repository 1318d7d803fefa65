"""Status of a run's jobs under Slurm, and which of them a caretaker has to look after."""

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
"""Of one job without progress of the run; then a person has to resume it."""
MAX_JOB_LIFETIME_TO_BLAME_NODE_S = 60.0
"""A job without a word of any task that lived this long has started; its node is not to blame."""
MAX_EXIT_FILE_DELAY_S = 30.0
"""For which a node may not see a file that another has written: storage caches folders."""


class StageJobs(BaseConfig):
    leader: str
    others: tuple[str, ...]
    done_marker: Path
    """When this file exists the stage needs no jobs."""

    @property
    def jobs(self) -> tuple[str, ...]:
        return (self.leader, *self.others)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What is known of the newest submission of one job."""

    name: str
    submission: Submission | None
    """None if the job was never submitted."""
    slurm_record: SlurmJobRecord | None
    """As Slurm has it; None if Slurm does not know it."""
    task_exits: tuple[TaskExit, ...]
    """What its tasks said last."""
    is_alive: bool
    cancelled_by_person: bool = False
    is_given_up: bool = False
    """Caretakers have submitted it as often as they do without progress of the run."""

    @property
    def state(self) -> JobState:
        return self.slurm_record.state if self.slurm_record else UNKNOWN_STATE

    @property
    def is_running(self) -> bool:
        return self.state.phase is JobPhase.RUNNING

    @property
    def is_held_after_failed_launch(self) -> bool:
        held = self.slurm_record
        return held is not None and is_held_after_failed_launch(held.reason)

    @property
    def ended_idle(self) -> bool:
        """It gave its nodes back, as the jobs that it works with were not there."""
        codes = {one.exit_code for one in self.task_exits}
        return IDLE_EXIT_CODE in codes and not any(one.is_crash for one in self.task_exits)

    @property
    def reason_to_submit(self) -> str:
        """Why it is to be submitted again, to follow the job's name; empty if it is not."""
        is_decided = self.name != CARETAKER_JOB and any(
            one.exit_code == 0 or one.gave_up for one in self.task_exits
        )
        if self.is_alive or is_decided or self.cancelled_by_person or self.is_given_up:
            return ""
        if self.submission is None:
            return "was never submitted"
        if self.slurm_record is not None and self.state.phase is JobPhase.UNKNOWN:
            return ""  # a newer Slurm has it, in a state that is not known here
        ended_at = (self.slurm_record and self.slurm_record.ended_or_latest_end_at) or 0.0
        if self.state.name == "COMPLETED" and time.time() - ended_at < MAX_EXIT_FILE_DELAY_S:
            return ""  # its tasks may have said that they are done
        return "had released its nodes" if self.ended_idle else self.state.meaning

    @property
    def faulty_node(self) -> str:
        """The node that ended the job before a task said anything; empty for none."""
        queued = self.slurm_record
        has_ended = self.state.name in ("FAILED", "COMPLETED")
        if queued is None or self.task_exits or not queued.nodes or not has_ended:
            return ""
        lived_s = (queued.ended_or_latest_end_at or 0.0) - (queued.started_or_expected_at or 0.0)
        return (
            expand_node_list(queued.nodes)[0] if lived_s < MAX_JOB_LIFETIME_TO_BLAME_NODE_S else ""
        )


def select_jobs_to_watch(
    own_job: str, stages: Sequence[StageJobs], jobs: Mapping[str, JobStatus]
) -> list[str]:
    """Names of the jobs that the caretaker of `own_job` has to look after now, in order. Pure.

    From outside: no stage whose leading job stays away, and no idle job while those that it works
    with wait in the queue.
    """
    waiting_job = [name for name in jobs if name == CARETAKER_JOB]
    if own_job == CARETAKER_JOB:
        found: list[str] = []
        for stage in stages:
            leader = jobs[stage.leader]
            if not (leader.is_alive or leader.reason_to_submit):
                break
            for name in stage.jobs:
                partners = stage.others if name == stage.leader else (stage.leader,)
                is_lonely = not any(jobs[one].is_running for one in partners) and any(
                    jobs[one].is_alive for one in partners
                )
                found += [] if jobs[name].ended_idle and is_lonely else [name]
        return [*found, *waiting_job]
    (stage,) = stages
    if own_job == stage.leader:
        return [*stage.others, *waiting_job]
    leader = jobs[stage.leader]
    if leader.is_alive and not leader.is_held_after_failed_launch:
        return []
    first = next((name for name in stage.others if jobs[name].is_running), "")
    return [stage.leader] if first == own_job else []


class JobStatusReader:
    """Reads the newest submissions of a run's jobs, what Slurm has of them, what tasks said."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self.queue = QueuePoller()

    def read(self, names: Sequence[str]) -> dict[str, JobStatus]:
        submissions = read_submissions(self._paths.submissions)
        latest = get_latest_submissions(submissions)
        newest = {name: latest[name] for name in names if name in latest}
        ids = [one.job_id for one in newest.values()]
        snapshot = self.queue.poll(ids).filter_jobs(ids, partial(is_job_of_run, self._paths))
        if snapshot.outage:
            raise ClusterError(snapshot.outage)
        alive = {
            name for name, one in newest.items() if is_live_state(snapshot.get_state(one.job_id))
        }
        if not alive.issuperset(names):  # Slurm is asked once where nothing is missing
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
        # Of two that were submitted at the same time the newest may have given way to the other.
        recorded = {one.job for one in submissions if one.job_id in at_work}
        return recorded | {
            one.submission.job for one in list_unrecorded_live_jobs(self._paths, queued)
        }

    def _read_status(
        self,
        job_name: str,
        submission: Submission | None,
        queued_jobs: Mapping[str, SlurmJobRecord],
        is_alive: bool,
    ) -> JobStatus:
        if submission is None:
            return JobStatus(job_name, None, None, (), is_alive)
        files, found = self._paths.job(job_name), queued_jobs.get(submission.job_id)
        exits = read_task_exits(files).values()
        own = tuple(one for one in exits if one.incarnation.rpartition(".")[0] == submission.job_id)
        by_person = self._was_cancelled_by_person(submission, found)
        is_given_up = not is_alive and count_submissions(files) > MAX_SUBMISSIONS_WITHOUT_PROGRESS
        return JobStatus(job_name, submission, found, own, is_alive, by_person, is_given_up)

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
            elif is_noted and not by_person:  # accounting knew better later, or it runs again
                note.unlink(missing_ok=True)
        return by_person


def read_slurm_info(job: JobPaths) -> SlurmLaunchInfo:
    info = read_launch_file(job.launch).slurm
    assert info is not None
    return info


def count_submissions(job: JobPaths) -> int:
    """Submissions by caretakers since the run made progress."""
    with contextlib.suppress(FileNotFoundError):
        before = decode_json(job.caretaker_submission_count.read_bytes(), dict[str, int])
        is_current = before["progress_bytes"] == read_progress_bytes(read_slurm_info(job).progress)
        return before["submissions"] if is_current else 0
    return 0


def write_submission_count(job: JobPaths, count: int) -> None:
    progress_bytes = read_progress_bytes(read_slurm_info(job).progress)
    content = {"submissions": count, "progress_bytes": progress_bytes}
    write_atomic(job.caretaker_submission_count, msgspec.json.encode(content))
