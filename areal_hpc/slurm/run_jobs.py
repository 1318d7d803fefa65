"""Jobs of a run as Slurm has them, whether the run directory records them or not.

Slurm is right about what exists: a submission that was killed, or whose answer was lost, leaves
jobs that no file names. Their comment names the run directory.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jobs import Submission, read_submissions
from areal_hpc.rundir.paths import RECIPE_FILE, RunPaths
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT, read_recent_events
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.queue import (
    QueuePoller,
    SlurmJobRecord,
    is_live_state,
    query_squeue,
    query_squeue_of_user,
)
from areal_hpc.slurm.states import INVALID_DEPENDENCY_REASON, JobPhase, is_held_by_user

log = logging.getLogger(__name__)

_TOKEN_PATTERN = re.compile(r"\.([0-9a-f]{8})$")


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A job of a run that waits or runs."""

    submission: Submission
    slurm_record: SlurmJobRecord
    is_recorded: bool

    @property
    def is_held(self) -> bool:
        is_waiting = self.slurm_record.state.phase is JobPhase.WAITING
        return is_waiting and is_held_by_user(self.slurm_record.reason)


def is_job_of_run(paths: RunPaths, job: SlurmJobRecord) -> bool:
    """True unless the name or the comment of a job that a run records says that it is another's.

    Slurm counts ids anew when it runs out of them, or is set up again; and a copy of a run's folder
    records the jobs of that run.
    """
    if not job.names:
        return True
    return paths.root.parent.name in job.names and _find_run_of_job(paths, job) is None


def find_original(paths: RunPaths) -> Path | None:
    """The run of which this folder is a copy, if jobs of that run wait or run."""
    if not (ids := list_recorded_job_ids(paths)):
        return None
    return find_run_of_jobs(paths, query_squeue(ids))


def find_run_of_jobs(paths: RunPaths, jobs: Iterable[SlurmJobRecord]) -> Path | None:
    found = (_find_run_of_job(paths, job) for job in jobs if is_live_state(job.state))
    return next((run for run in found if run is not None), None)


def _find_run_of_job(paths: RunPaths, job: SlurmJobRecord) -> Path | None:
    """Another run that is there and that the job's comment begins with.

    One that is not there was moved to this place.
    """
    if not job.comment or f"{job.comment} ".startswith(f"{paths.root} "):
        return None
    words = job.comment.split(" ")
    places = (Path(" ".join(words[:count])) for count in range(len(words), 0, -1))
    try:
        run = next((place for place in places if (place / RECIPE_FILE).exists()), None)
        if run is None or run.samefile(paths.root):  # it has another name, as by a link
            return None
    except OSError:  # of another user, or of storage that is away: nobody knows
        return None
    return run


def list_recorded_job_ids(paths: RunPaths) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.job_id for one in read_submissions(paths.submissions)))


def was_submission_refused_recently(paths: RunPaths) -> bool:
    events = read_recent_events(paths.events)
    return any(row["event"] == SUBMISSION_REFUSED_EVENT for row in events)


def list_unrecorded_live_jobs(
    paths: RunPaths, queued_jobs: Sequence[SlurmJobRecord] | None = None
) -> list[LiveJob]:
    """Jobs that wait or run, name this run in their comment, and are not on record.

    `queued_jobs` are the jobs of the run's owner; Slurm is asked unless they are given.
    """
    if not paths.root.exists():
        return []
    recorded = set(list_recorded_job_ids(paths))
    jobs = query_squeue_of_user(paths.root.stat().st_uid) if queued_jobs is None else queued_jobs
    return [
        LiveJob(submission, job, is_recorded=False)
        for job in jobs
        if job.job_id not in recorded
        and is_live_state(job.state)
        and (submission := _build_submission_record(paths, job)) is not None
    ]


def list_live_jobs(paths: RunPaths) -> list[LiveJob]:
    """All jobs of a run that wait or run: those on record first, oldest first."""
    recorded = {one.job_id: one for one in read_submissions(paths.submissions)}
    found = {job.job_id: job for job in query_squeue(sorted(recorded)) if is_live_state(job.state)}
    live = [
        LiveJob(submission, found[job_id], is_recorded=True)
        for job_id, submission in recorded.items()
        if job_id in found and is_job_of_run(paths, found[job_id])
    ]
    return [*live, *list_unrecorded_live_jobs(paths)]


def _build_submission_record(paths: RunPaths, job: SlurmJobRecord) -> Submission | None:
    if not f"{job.comment} ".startswith(f"{paths.root} "):
        return None
    token = _TOKEN_PATTERN.search(job.name)
    full_name = _TOKEN_PATTERN.sub("", job.name)
    name = full_name.removeprefix(f"{paths.queue_name}-")
    return Submission(
        job=name,
        job_id=job.job_id,
        attempt=max(paths.list_attempts(), default=1),
        submitted_at=0.0,
        script=str(paths.job(name).script) if re.fullmatch(r"[\w.-]+", name) else "",
        token=token[1] if token else "",
    )


def was_probably_cancelled_by_person(
    job: SlurmJobRecord, queue: QueuePoller, owner_id: int
) -> bool:
    """True unless Slurm did it, as accounting says, or an administrator for another user.

    Of what Slurm cancels by itself accounting names no user.
    """
    if not job.state.is_cancelled or job.reason == INVALID_DEPENDENCY_REASON:
        return False
    past = queue.read_accounting([job.job_id])
    if not past or not past[-1].state.is_cancelled:
        return True  # nobody knows, or not yet
    user_id = past[-1].cancelled_by
    if user_id is None:
        return False
    if user_id == owner_id:
        return True
    return user_id != 0 and user_id != _find_slurm_user_id()


def _find_slurm_user_id() -> int | None:
    try:
        return scontrol.read_slurm_user_id()
    except ClusterError as error:
        log.info("Slurm was not asked which user it runs as: %s", error)
        return None
