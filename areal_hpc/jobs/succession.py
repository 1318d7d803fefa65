"""Succession of a job under Slurm: one of its successors starts, and takes its place.

Successors are laid at submission (`slurm/batch_script/successors.py`). One that starts runs the
same launch file as the job's next start. It leaves at once, and with success, where nobody is to
bring the job back: then Slurm removes those behind it.
"""

import logging
import time
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jobs import (
    LaunchFile,
    SlurmLaunchInfo,
    Submission,
    get_latest_submissions,
    list_waiting_successors,
    read_submissions,
    read_task_exits,
    record_submission,
)
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.queue import QueuePoller, SlurmJobRecord, query_live_job_ids

log = logging.getLogger(__name__)


def find_next_successor(slurm: SlurmLaunchInfo, job: str, job_id: str) -> Submission | None:
    """The successor that starts when this job ends without success; None if there is none.

    A slurmctld that may not be asked, or is silent, is taken to have those that were recorded.
    """
    try:
        laid = list_waiting_successors(read_submissions(Path(slurm.submissions)), job)
    except OSError as error:
        log.warning("successors of this job cannot be looked up: %s", error)
        return None
    waiting = [one for one in laid if one.job_id != job_id]
    try:
        live = set(query_live_job_ids([one.job_id for one in waiting]))
    except ClusterError as error:
        log.info("Slurm was not asked for the successors of this job: %s", error)
        return next(iter(waiting), None)
    return next((one for one in waiting if one.job_id in live), None)


def find_own_record_as_successor(
    slurm: SlurmLaunchInfo, job: str, job_id: str
) -> Submission | None:
    laid = list_waiting_successors(read_submissions(Path(slurm.submissions)), job)
    return next((one for one in laid if one.job_id == job_id), None)


def find_reason_not_to_take_over(launch: LaunchFile, slurm: SlurmLaunchInfo) -> str:
    """Why a successor that starts is not to take the job's place; empty if it is."""
    if Path(slurm.cancelled).exists():
        return "the run was cancelled"
    if slurm.prerequisite and not Path(slurm.prerequisite).exists():
        return "the stage before this one did not end well"
    exits = read_task_exits(launch.paths).values()
    if (decision := next((one for one in exits if one.gave_up), None)) is not None:
        return f"{launch.job.name} gave up: {decision.reason}"
    before = get_latest_submissions(read_submissions(Path(slurm.submissions))).get(launch.job.name)
    if before is None:
        return ""
    queue, owner_id = QueuePoller(), Path(slurm.submissions).stat().st_uid
    try:
        queued = queue.poll([before.job_id]).jobs.get(before.job_id)
    except ClusterError as error:
        log.info("Slurm was not asked how the job before this one ended: %s", error)
        return ""
    if queued is not None and was_probably_cancelled_by_person(queued, queue, owner_id):
        return f"a person cancelled {launch.job.name} (job {before.job_id})"
    return ""


def was_probably_cancelled_by_person(
    job: SlurmJobRecord, queue: QueuePoller, owner_id: int
) -> bool:
    """True unless accounting says that Slurm did it, or an administrator for another user.

    Of what Slurm cancels by itself accounting names no user.
    """
    if not job.state.is_cancelled:
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


def record_as_current_job(slurm: SlurmLaunchInfo, successor: Submission) -> None:
    """Record that a successor is the job from now on."""
    placed = msgspec.structs.replace(successor, successor=0, submitted_at=time.time())
    try:
        record_submission(Path(slurm.submissions), placed)
    except OSError as error:  # commands see in the queue which of the jobs runs
        log.error("it cannot be recorded that this job takes the place of another: %s", error)
