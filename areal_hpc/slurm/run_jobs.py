"""Jobs of a run as Slurm has them, whether the run directory records them or not.

Slurm is right about what exists: a submission that was killed, or whose answer was lost, leaves
jobs that no file names. Their comment names the run directory.
"""

import re
from dataclasses import dataclass

from areal_hpc.rundir.jobs import Submission, read_submissions
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuedJob, call_squeue, is_live_state, list_jobs_of_user
from areal_hpc.slurm.states import JobPhase

_TOKEN_PATTERN = re.compile(r"\.([0-9a-f]{8})$")
HELD_BY_USER_REASON = "JobHeldUser"


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A job of a run that waits or runs."""

    submission: Submission
    queued: QueuedJob
    is_recorded: bool

    @property
    def is_held(self) -> bool:
        """True if it waits to be released by its user."""
        is_waiting = self.queued.state.phase is JobPhase.WAITING
        return is_waiting and self.queued.reason == HELD_BY_USER_REASON


def get_experiment_label(paths: RunPaths) -> str:
    """Text in the name or the comment of every Slurm job of a run."""
    return paths.root.parent.name


def list_recorded_job_ids(paths: RunPaths) -> tuple[str, ...]:
    """Every id that was recorded for a job of this run, oldest first."""
    return tuple(submission.job_id for submission in read_submissions(paths.submissions))


def list_unrecorded_jobs(paths: RunPaths) -> list[LiveJob]:
    """Jobs that wait or run, name this run in their comment, and are not on record.

    Raises:
        SlurmTimeoutError: slurmctld does not answer.
        SlurmNotFoundError: Slurm's commands are not installed here.
    """
    recorded = set(list_recorded_job_ids(paths))
    jobs = list_jobs_of_user(paths.root.stat().st_uid) if paths.root.exists() else []
    return [
        LiveJob(_infer_submission(paths, job), job, is_recorded=False)
        for job in jobs
        if job.job_id not in recorded
        and is_live_state(job.state)
        and f"{job.comment} ".startswith(f"{paths.root} ")
    ]


def list_live_jobs(paths: RunPaths) -> list[LiveJob]:
    """All jobs of a run that wait or run: those on record first, oldest first.

    Raises:
        SlurmTimeoutError: slurmctld does not answer.
        SlurmNotFoundError: Slurm's commands are not installed here.
    """
    recorded = {one.job_id: one for one in read_submissions(paths.submissions)}
    label = get_experiment_label(paths)
    found = {job.job_id: job for job in call_squeue(sorted(recorded)) if is_live_state(job.state)}
    live = [
        LiveJob(submission, found[job_id], is_recorded=True)
        for job_id, submission in recorded.items()
        if job_id in found
        and (not found[job_id].name_and_comment or label in found[job_id].name_and_comment)
    ]
    return [*live, *list_unrecorded_jobs(paths)]


def _infer_submission(paths: RunPaths, job: QueuedJob) -> Submission:
    """The record that a job would have, by its name in Slurm."""
    token = _TOKEN_PATTERN.search(job.name)
    prefix = f"{paths.root.parent.name}-{paths.root.name}-"
    name = _TOKEN_PATTERN.sub("", job.name).removeprefix(prefix)
    return Submission(
        job=name,
        job_id=job.job_id,
        attempt=max(paths.list_attempts(), default=1),
        submitted_at=0.0,
        script=str(paths.job(name).script) if re.fullmatch(r"[\w.-]+", name) else "",
        token=token[1] if token else "",
    )
