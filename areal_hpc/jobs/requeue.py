"""Requeueing of a stopped Slurm job; the decision is in restart_policy.py.

A job that ends at a preemption's warning has failed in Slurm's eyes, and is not started again: it
must ask for that itself, or outlast the warning.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmNotFoundError, SlurmTimeoutError
from areal_hpc.jobs.restart_policy import (
    PERMANENT_EXIT_CODES,
    SLURM_JOB_RESTART_POLICY,
    TIME_LIMIT_REASON,
    FailuresWithoutProgress,
    RestartDecision,
)
from areal_hpc.jobs.succession import find_next_successor
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.cancellation import is_cancelled
from areal_hpc.rundir.jobs import (
    LaunchFile,
    SlurmLaunchInfo,
    Submission,
    TaskExit,
    add_excluded_node,
    list_jobs_that_gave_nodes_back,
    list_unexpired_excluded_nodes,
    read_excluded_nodes_with_expired,
)
from areal_hpc.rundir.paths import JobPaths
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.allocation import expand_node_list
from areal_hpc.slurm.resubmit import RETRY_PAUSE_S, retry_and_log, submit_job_again

log = logging.getLogger(__name__)

MAX_EXCLUDED_NODES = 16
"""When so many nodes have failed the probe, something else is wrong."""
PAUSES_BEFORE_WRITING_AGAIN_S = (60.0, 120.0, 240.0)
REQUEUE_TIMEOUT_WITH_SUCCESSOR_S = 60.0
"""Longest that a job with a successor asks a slurmctld that does not answer."""
_STATES_BEFORE_HOLD = (scontrol.RUNNING_STATE, "COMPLETING")

RequeueResult = Literal[
    "requeued",
    "held",
    "held for user",
    "resubmitted",
    "left to successor",
    "cancelled",
    "ended by Slurm",
    "not requeued",
]


class StartProgressTracker:
    """Progress of the run in this start of a job, and the earlier starts that made none.

    `progress` names the file that grows while the run gets further; empty if there is none.
    """

    def __init__(self, job: JobPaths, progress: str) -> None:
        self._path = job.failure_count
        self._progress = Path(progress) if progress else None
        self._began_at = time.monotonic()
        self._began_bytes = self._read_progress_bytes()

    def _read_progress_bytes(self) -> int:
        try:
            return self._progress.stat().st_size if self._progress else 0
        except OSError:
            return 0

    def update_failure_counts(
        self, outcomes: Sequence[TaskExit], *, waits_for_room: bool = True
    ) -> FailuresWithoutProgress:
        """Count this start, and remember the counts. Other stops than at a limit count nowhere.

        After a crash that another start may mend, `waits_for_room` has a disk without room waited
        for, some minutes.
        """
        has_grown = self._read_progress_bytes() > self._began_bytes
        lived_s = time.monotonic() - self._began_at
        before = self._read_failure_counts()
        counts = FailuresWithoutProgress(
            SLURM_JOB_RESTART_POLICY.count_failures(
                before.failures,
                made_progress=has_grown or lived_s >= SLURM_JOB_RESTART_POLICY.healthy_s,
                has_failed=any(one.is_crash and not one.faulty_node for one in outcomes),
            ),
            (0 if has_grown else before.time_limit_stops)
            + any(one.reason == TIME_LIMIT_REASON for one in outcomes),
        )
        codes = {one.exit_code for one in outcomes if one.is_crash}
        waits = waits_for_room and codes and PERMANENT_EXIT_CODES.isdisjoint(codes)
        for pause_s in (*(PAUSES_BEFORE_WRITING_AGAIN_S if waits else ()), None):
            try:
                write_atomic(self._path, msgspec.json.encode(counts))
                break
            except OSError as error:
                log.error("the counts of starts could not be written: %s", error)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    break  # another node may see the storage
                if pause_s is None:
                    return msgspec.structs.replace(counts, unwritten_because=str(error))
                time.sleep(pause_s)
        return counts

    def _read_failure_counts(self) -> FailuresWithoutProgress:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=FailuresWithoutProgress)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("the counts of starts cannot be read: %s", error)
        return FailuresWithoutProgress()


def record_new_faulty_nodes(
    slurm: SlurmLaunchInfo, outcomes: Sequence[TaskExit], job_id: str
) -> list[str]:
    """Put the nodes that failed the probe on the run's list; those that are new there."""
    path = Path(slurm.excluded_nodes)
    known = list_unexpired_excluded_nodes(path)
    faulty = {one.faulty_node: one.reason for one in outcomes if one.faulty_node}
    new = {node: reason for node, reason in faulty.items() if node not in known}
    for node, reason in new.items():
        add_excluded_node(path, node, reason, job_id)
    return list(new)


def build_exclude_list(slurm: SlurmLaunchInfo, already_excluded: str) -> str:
    """Nodes that a job must not get: those `already_excluded`, and those that failed since.

    Both in Slurm's notation. Those of the run's list whose time is up are left out, unless the
    recipe excludes them.
    """
    path = Path(slurm.excluded_nodes)
    excluded = list_unexpired_excluded_nodes(path)
    expired = {one.node for one in read_excluded_nodes_with_expired(path)}.difference(
        excluded, expand_node_list(slurm.excluded_by_recipe)
    )
    named = expand_node_list(already_excluded)
    if not expired.isdisjoint(named):
        already_excluded = ",".join(node for node in named if node not in expired)
    return ",".join(
        filter(None, (already_excluded, *(node for node in excluded if node not in named)))
    )


def requeue_or_resubmit(
    launch: LaunchFile,
    give_up_at: float,
    decision: RestartDecision = "restart",
    report_refusal: Callable[[str], None] = log.error,
) -> RequeueResult:
    """Have this job, which runs, started once more, by Slurm or by submitting its script again.

    A slurmctld that does not answer is asked again until `give_up_at` (monotonic). With `hold` the
    job is not started before `release_jobs_held_while_idle` is called for its run; with
    `hold_for_user` its user has to release it.

    Returns:
        What was done; "ended by Slurm" where it already ends or requeues the job, "left to
        successor" where it could not be asked, or refused, and one was laid at submission, "not
        requeued" where there is none.
    """
    assert launch.slurm is not None
    job_id = scontrol.get_own_job_id(os.environ)
    successor = find_next_successor(launch.slurm, launch.job.name, job_id)
    otherwise: RequeueResult = "left to successor" if successor else "not requeued"
    if successor is not None:
        give_up_at = min(give_up_at, time.monotonic() + REQUEUE_TIMEOUT_WITH_SUCCESSOR_S)
    while not is_cancelled(Path(launch.slurm.cancelled)):
        try:
            return _request_restart(launch, launch.slurm, job_id, give_up_at, decision, successor)
        except (SlurmTimeoutError, OSError) as silence:
            log.warning("slurmctld or storage did not answer, asking again: %s", silence)
            if time.monotonic() >= give_up_at:
                return otherwise
            time.sleep(RETRY_PAUSE_S)
        except (SlurmNotFoundError, SlurmCommandError) as refusal:
            if successor is None:
                report_refusal(f"this job cannot be requeued: {refusal.problems[0].message}")
            return otherwise
    return "cancelled"


def cancel_own_job(job_id: str) -> None:
    """Have Slurm end this job as cancelled: by itself it would end as failed, being stopped."""
    try:
        scontrol.cancel_job(job_id)
    except ClusterError as error:
        log.warning("this job does not end as cancelled: %s", error)


def _request_restart(
    launch: LaunchFile,
    slurm: SlurmLaunchInfo,
    job_id: str,
    give_up_at: float,
    decision: RestartDecision,
    successor: Submission | None,
) -> RequeueResult:
    facts = scontrol.query_job(job_id)
    excluded = _build_exclude_list_or_keep(slurm, facts.excluded_nodes)
    if facts.state != scontrol.RUNNING_STATE:
        log.info("Slurm reports this job as %s; it will not be requeued", facts.state)
        # From 24.11 a slurmctld that was away over a time limit ends the job before it is asked.
        if facts.has_timed_out and successor is None:
            return _resubmit(launch, slurm, job_id, excluded, give_up_at, decision)
        return "ended by Slurm"
    try:
        if decision == "hold_for_user":
            scontrol.control_job("requeuehold", job_id)
            return "held for user"
        if decision == "hold" and _requeue_held_and_note_it(launch.paths, job_id):
            return "held"
        scontrol.control_job("requeue", job_id)
    except SlurmCommandError as refusal:
        if successor is not None:
            log.warning("%s; job %s takes its place", refusal, successor.job_id)
            if excluded:
                _exclude_from(successor.job_id, excluded)
            return "left to successor"
        log.warning("%s; its script is submitted again", refusal)
        return _resubmit(launch, slurm, job_id, excluded, give_up_at, decision)
    if excluded != facts.excluded_nodes:
        # Not before: Slurm changes this of waiting jobs alone. Not too late: a requeued job waits
        # until its old credential has expired.
        _exclude_from(job_id, excluded)
    return "requeued"


def _resubmit(
    launch: LaunchFile,
    slurm: SlurmLaunchInfo,
    job_id: str,
    excluded_nodes: str,
    give_up_at: float,
    decision: RestartDecision,
) -> RequeueResult:
    new_id = submit_job_again(
        slurm,
        launch.job.name,
        [f"--exclude={excluded_nodes}"] if excluded_nodes else [],
        timeout_s=give_up_at - time.monotonic(),
        hold=decision in ("hold", "hold_for_user"),
        own_id=job_id,
    )
    if decision == "hold_for_user":
        return "held for user"
    if decision != "hold":
        return "resubmitted"
    if _note_hold(launch.paths, new_id):
        return "held"
    retry_and_log(lambda: scontrol.control_job("release", new_id))
    return "resubmitted"


def _build_exclude_list_or_keep(slurm: SlurmLaunchInfo, already_excluded: str) -> str:
    try:
        return build_exclude_list(slurm, already_excluded)
    except OSError as error:
        log.error("no further nodes are excluded, as their list cannot be read: %s", error)
        return already_excluded


def _exclude_from(waiting_job_id: str, excluded_nodes: str) -> None:
    retry_and_log(
        lambda: scontrol.update_waiting_job(waiting_job_id, "ExcNodeList", excluded_nodes)
    )


def _requeue_held_and_note_it(job: JobPaths, job_id: str) -> bool:
    """Hold the job until it is wanted; False if that could not be noted.

    Noted first: a job that is held and not on the list would be held for good.
    """
    if not _note_hold(job, job_id):
        return False
    try:
        scontrol.control_job("requeuehold", job_id)
    except (SlurmCommandError, SlurmNotFoundError):
        job.hold_note.unlink()
        raise  # not so after silence: slurmctld may have held the job all the same
    return True


def _note_hold(job: JobPaths, job_id: str) -> bool:
    note = job.hold_note
    try:
        note.parent.mkdir(exist_ok=True)
        note.write_text(job_id)
    except OSError as error:
        log.error("the job is not held, as that cannot be noted: %s", error)
        return False
    return True


def release_jobs_held_while_idle(jobs_dir: Path, only_job: str = "") -> list[str]:
    """Let jobs go on that gave their nodes back, or `only_job` one of them; their names.

    Cheap if there are none. One that Slurm does not release yet stays on the list, for the next
    call.
    """
    released = []
    held = [
        job.hold_note
        for job in list_jobs_that_gave_nodes_back(jobs_dir)
        if only_job in ("", job.root.name)
    ]
    for note in held:
        if not (job_id := _read_hold_note(note)):
            continue
        try:
            if scontrol.query_job(job_id).state in _STATES_BEFORE_HOLD:
                continue
            scontrol.control_job("release", job_id)
            released.append(note.name)
            note.unlink(missing_ok=True)
        except SlurmCommandError as refusal:  # it was cancelled, or is an administrator's
            reason = "Slurm refused, it may be cancelled or held by an administrator"
            log.warning("cannot release %s: %s (%s)", note.name, reason, refusal)
            note.unlink(missing_ok=True)
        except ClusterError as error:
            log.warning("%s cannot be released yet: %s", note.name, error)
    return released


def _read_hold_note(note_path: Path) -> str:
    try:
        return note_path.read_text()
    except FileNotFoundError:
        return ""
