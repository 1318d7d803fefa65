"""Another start of a Slurm job under its own number; `restarts.decide_restart` decides.

A job that ends at a preemption's warning has failed in Slurm's eyes, and is not started again: it
must ask for that itself, or outlast the warning. What cannot ask ends, for a caretaker to submit.
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
"""When so many nodes have failed the probe, something else is wrong."""
PAUSES_BEFORE_WRITING_AGAIN_S = (60.0, 120.0, 240.0)
RETRY_PAUSE_S = 1.0

RequeueResult = Literal["requeued", "cancelled", "ended by Slurm", "not requeued"]


def read_progress_bytes(progress: str) -> int:
    """Size of the file that grows while the run gets further; 0 without one."""
    try:
        return Path(progress).stat().st_size if progress else 0
    except OSError:
        return 0


class StartProgressTracker:
    """Progress of the run in this start of a job, and the earlier starts that made none."""

    def __init__(self, job: JobPaths, progress: str) -> None:
        self._path = job.failure_count
        self._progress = progress
        self._began_at = time.monotonic()
        self._began_bytes = read_progress_bytes(progress)

    def update_failure_counts(
        self, outcomes: Sequence[TaskExit], *, waits_for_room: bool = True
    ) -> FailuresWithoutProgress:
        """Count this start, and remember the counts. Other stops than at a limit count nowhere.

        After a crash that another start may mend, `waits_for_room` has a disk without room waited
        for, some minutes.
        """
        has_grown = read_progress_bytes(self._progress) > self._began_bytes
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
            return decode_json(self._path.read_bytes(), FailuresWithoutProgress)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("the counts of starts cannot be read: %s", error)
        return FailuresWithoutProgress()


def exclude_nodes(paths: RunPaths, reasons: Mapping[str, str], job_id: str) -> list[str]:
    """Put nodes on the run's list, unless it is too long to be true; those that are new there."""
    known = list_unexpired_excluded_nodes(paths.excluded_nodes)
    room = max(0, MAX_EXCLUDED_NODES - len(known))
    new = [node for node in reasons if node not in known][:room]
    for node in new:
        add_excluded_node(paths.excluded_nodes, node, reasons[node], job_id)
    return new


def build_exclude_list(paths: RunPaths, excluded_by_recipe: str, already_excluded: str) -> str:
    """Nodes that a job must not get: those `already_excluded`, and those that failed since.

    Both in Slurm's notation. Those of the run's list whose time is up are left out, unless the
    recipe excludes them.
    """
    path = paths.excluded_nodes
    excluded = list_unexpired_excluded_nodes(path)
    expired = {one.node for one in read_excluded_nodes(path)}.difference(
        excluded, expand_node_list(excluded_by_recipe)
    )
    named = expand_node_list(already_excluded)
    if not expired.isdisjoint(named):
        already_excluded = ",".join(node for node in named if node not in expired)
    return ",".join(
        filter(None, (already_excluded, *(node for node in excluded if node not in named)))
    )


def requeue_own_job(
    paths: RunPaths,
    excluded_by_recipe: str,
    give_up_at: float,
    report_refusal: Callable[[str], None] = log.error,
) -> RequeueResult:
    """Have Slurm start this job, which runs, once more.

    A slurmctld that does not answer is asked again until `give_up_at` (monotonic).

    Returns:
        What was done; "cancelled" in a run that was, "ended by Slurm" where it already ends or
        requeues the job, "not requeued" where it refused, or could not be asked.
    """
    job_id = os.environ["SLURM_JOB_ID"]
    while not is_cancelled(paths.cancelled_marker):
        try:
            return _requeue_job(paths, excluded_by_recipe, job_id)
        except (SlurmTimeoutError, OSError) as silence:
            log.warning("slurmctld or storage did not answer, asking again: %s", silence)
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
        # Not before: Slurm changes this of waiting jobs alone. Not too late: a requeued job waits
        # until its old credential has expired.
        scontrol.retry_command(lambda: scontrol.update_waiting_job(job_id, "ExcNodeList", excluded))
    return "requeued"


def cancel_own_job(job_id: str) -> None:
    """Have Slurm end this job as cancelled: by itself it would end as failed, being stopped."""
    try:
        scontrol.cancel_job(job_id)
    except ClusterError as error:
        log.warning("this job does not end as cancelled: %s", error)
