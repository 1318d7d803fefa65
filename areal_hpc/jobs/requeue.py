"""Requeue of a Slurm job under its own id, after `restarts.decide_restart` decided for it.

Slurm counts a job that ends at a preemption's warning as failed and does not start it again: the
job must requeue itself, or outlast the warning. A job that cannot do so ends, and a caretaker
submits it.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmNotFoundError, SlurmTimeoutError
from areal_hpc.jobs.restarts import (
    PERMANENT_EXIT_CODES,
    SLURM_JOB_RESTART_POLICY,
    TIME_LIMIT_REASON,
    FailuresWithoutProgress,
)
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.jobs import (
    TaskExit,
    add_excluded_node,
    is_cancelled,
    list_unexpired_excluded_nodes,
    read_excluded_nodes,
)
from areal_hpc.rundir.paths import JobPaths, RunPaths
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.scontrol import expand_node_list
from areal_hpc.wire.decoding import decode_json

log = logging.getLogger(__name__)

MAX_EXCLUDED_NODES = 16
"""Maximum number of excluded nodes; further failures have another cause than the nodes."""
PAUSES_BEFORE_WRITING_AGAIN_S = (60.0, 120.0, 240.0)
RETRY_PAUSE_S = 1.0

RequeueResult = Literal["requeued", "cancelled", "ended by Slurm", "not requeued"]


def read_progress_bytes(progress: str) -> int:
    """Return the size of the file that grows with the run's progress; 0 without a file."""
    try:
        return Path(progress).stat().st_size if progress else 0
    except OSError:
        return 0


class StartProgressTracker:
    """Tracker of the run's progress in this start of a job, and counter of starts without any."""

    def __init__(self, job: JobPaths, progress: str) -> None:
        self._path = job.failure_count
        self._progress = progress
        self._began_at = time.monotonic()
        self._began_bytes = read_progress_bytes(progress)

    def update_failure_counts(
        self, outcomes: Sequence[TaskExit], *, waits_for_room: bool = True
    ) -> FailuresWithoutProgress:
        """Count this start's crash, or its stop at the time limit, and store the counts.

        With `waits_for_room` the count of a crash that another start may mend waits some minutes
        for room on a full disk.
        """
        has_grown = read_progress_bytes(self._progress) > self._began_bytes
        lived_s = time.monotonic() - self._began_at
        before = self._read_failure_counts()
        counts = FailuresWithoutProgress(
            SLURM_JOB_RESTART_POLICY.count_failures(
                before.failures,
                made_progress=has_grown or lived_s >= SLURM_JOB_RESTART_POLICY.healthy_s,
                has_failed=any(end.is_crash and not end.faulty_node for end in outcomes),
            ),
            (0 if has_grown else before.time_limit_stops)
            + any(end.reason == TIME_LIMIT_REASON for end in outcomes),
        )
        codes = {end.exit_code for end in outcomes if end.is_crash}
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
            return decode_json(self._path.read_bytes(), FailuresWithoutProgress)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("the counts of starts cannot be read: %s", error)
        return FailuresWithoutProgress()


def exclude_nodes(paths: RunPaths, reasons: Mapping[str, str], job_id: str) -> list[str]:
    """Add nodes to the run's list unless it is implausibly long; return the added ones."""
    known = list_unexpired_excluded_nodes(paths.excluded_nodes)
    room = max(0, MAX_EXCLUDED_NODES - len(known))
    new = [node for node in reasons if node not in known][:room]
    for node in new:
        add_excluded_node(paths.excluded_nodes, node, reasons[node], job_id)
    return new


def build_exclude_list(paths: RunPaths, excluded_by_recipe: str, already_excluded: str) -> str:
    """Build the list of nodes to exclude: those `already_excluded`, and those that failed since.

    Both are in Slurm's notation. Expired nodes of the run's list are left out unless the recipe
    excludes them.
    """
    path = paths.excluded_nodes
    excluded = list_unexpired_excluded_nodes(path)
    expired = {record.node for record in read_excluded_nodes(path)}.difference(
        excluded, expand_node_list(excluded_by_recipe)
    )
    already = expand_node_list(already_excluded)
    if not expired.isdisjoint(already):
        already_excluded = ",".join(node for node in already if node not in expired)
    return ",".join(
        filter(None, (already_excluded, *(node for node in excluded if node not in already)))
    )


def requeue_own_job(
    paths: RunPaths,
    excluded_by_recipe: str,
    give_up_at: float,
    report_refusal: Callable[[str], None] = log.error,
) -> RequeueResult:
    """Requeue this running job; retry until `give_up_at` (monotonic) if slurmctld is down.

    Returns:
        "cancelled" if the run is, "ended by Slurm" if Slurm already ends or requeues the job, "not
        requeued" if Slurm refused or did not answer, else "requeued".
    """
    job_id = os.environ["SLURM_JOB_ID"]
    while not is_cancelled(paths.cancelled_marker):
        try:
            return _requeue_job(paths, excluded_by_recipe, job_id)
        except (SlurmTimeoutError, OSError) as silence:
            log.warning("slurmctld or storage did not answer, trying again: %s", silence)
            if time.monotonic() >= give_up_at:
                return "not requeued"
            time.sleep(RETRY_PAUSE_S)
        except (SlurmNotFoundError, SlurmCommandError) as refusal:
            report_refusal(f"this job cannot be requeued: {refusal.problems[0].message}")
            return "not requeued"
    return "cancelled"


def _requeue_job(paths: RunPaths, excluded_by_recipe: str, job_id: str) -> RequeueResult:
    facts = scontrol.query_job(job_id)
    if facts.state != scontrol.RUNNING_STATE:
        log.info("Slurm reports this job as %s; it will not be requeued", facts.state)
        return "ended by Slurm"
    try:
        excluded = build_exclude_list(paths, excluded_by_recipe, facts.excluded_nodes)
    except OSError as error:
        log.error("no further nodes are excluded, as their list cannot be read: %s", error)
        excluded = facts.excluded_nodes
    scontrol.control_job("requeue", job_id)
    if excluded != facts.excluded_nodes:
        # Slurm allows this for waiting jobs alone, and a requeued job waits until its old
        # credential has expired, so it is not too late.
        scontrol.retry_command(lambda: scontrol.update_waiting_job(job_id, "ExcNodeList", excluded))
    return "requeued"


def cancel_own_job(job_id: str) -> None:
    """Cancel this job in Slurm; by itself a stopped job would end as failed."""
    try:
        scontrol.cancel_job(job_id)
    except ClusterError as error:
        log.warning("this job does not end as cancelled: %s", error)
