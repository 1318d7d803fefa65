"""Watch over a submitted run: its files, and the queue now and then."""

import contextlib
import math
import threading
import time

from areal_hpc.errors import (
    ClusterError,
    JobFailedError,
    RunInterruptedError,
    SlurmTimeoutError,
)
from areal_hpc.jobs import caretaker
from areal_hpc.jobs.restarts import find_crash_error
from areal_hpc.launch.foreground_launcher import ProgressReporter
from areal_hpc.launch.plan import JobStage, StagePlanner, plan_run
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    get_latest_submissions,
    is_cancelled,
    read_submissions,
    read_task_exits,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import query_live_job_ids

RUN_FILES_POLL_S = 0.5
"""Between two looks at the run's files."""
FIRST_QUEUE_POLL_S = 15.0
"""Between two questions to slurmctld, at first."""
MAX_QUEUE_POLL_S = 60.0
CARETAKER_TIMEOUT_S = 3 * caretaker.POLL_S
"""Time in which a caretaker has submitted the leading job again: it must miss it at two looks."""
JOBS_END_TIMEOUT_S = 120.0
"""Time that jobs get to end after the run's last step."""


def watch_submitted_run(
    recipe: Recipe,
    paths: RunPaths,
    reporter: ProgressReporter,
    stop: threading.Event,
    plan: StagePlanner = plan_run,
) -> None:
    """Show a submitted run's progress until it has ended and its jobs are gone."""
    poll_s, asked_at = FIRST_QUEUE_POLL_S, time.monotonic()
    gone_since: float | None = None
    while not paths.finished_marker.exists():
        planned = plan(recipe, paths, None)
        left = (one for one in planned if not one.done_marker.exists())
        if (stage := next(left, None)) is None:
            break  # it has just finished
        reporter.show_progress(stage.name)
        if stop.wait(RUN_FILES_POLL_S):
            raise RunInterruptedError
        if time.monotonic() - asked_at < poll_s:
            continue
        asked_at = time.monotonic()
        if not _is_job_gone(paths, stage.leader.name):
            poll_s, gone_since = min(poll_s * 1.5, MAX_QUEUE_POLL_S), None
            continue
        # Asked again soon: a caretaker may be submitting it at this moment.
        poll_s = FIRST_QUEUE_POLL_S
        if gone_since is None:
            gone_since = asked_at
        elif (
            asked_at - gone_since >= _choose_absence_timeout_s(paths, stage)
            and not paths.finished_marker.exists()
        ):
            raise _build_gone_job_error(paths, stage.leader.name)
    reporter.show_progress("train")
    _await_end_of_jobs(paths, reporter, stop)


def _is_job_gone(paths: RunPaths, job: str) -> bool:
    newest = get_latest_submissions(read_submissions(paths.submissions))[job]
    try:
        return not query_live_job_ids([newest.job_id])
    except ClusterError:
        return False  # slurmctld may be away for a while


def _choose_absence_timeout_s(paths: RunPaths, stage: JobStage) -> float:
    exits = read_task_exits(paths.job(stage.leader.name)).values()
    if is_cancelled(paths.cancelled_marker) or any(one.gave_up for one in exits):
        return 0.0
    newest = get_latest_submissions(read_submissions(paths.submissions))
    others = [newest[one.name].job_id for one in stage.others if one.name in newest]
    waiting = [newest[CARETAKER_JOB].job_id] if CARETAKER_JOB in newest else []
    try:
        if query_live_job_ids(others):
            return CARETAKER_TIMEOUT_S
        return math.inf if query_live_job_ids(waiting) else 0.0  # it is about to bring them back
    except ClusterError:
        return CARETAKER_TIMEOUT_S  # slurmctld may be away for a while


def _build_gone_job_error(paths: RunPaths, leader: str) -> JobFailedError:
    for job in (leader, *get_latest_submissions(read_submissions(paths.submissions))):
        if (
            crash := find_crash_error(job, list(read_task_exits(paths.job(job)).values()))
        ) is not None:
            return crash
    return JobFailedError(
        f"job {leader} disappeared before its work was done",
        key=str(paths.job(leader).submitit_dir),
        hint="read the files in that directory; submit again to resume",
        code=ClusterError.exit_code,
    )


def _await_end_of_jobs(paths: RunPaths, reporter: ProgressReporter, stop: threading.Event) -> None:
    live = [
        one.job_id for one in get_latest_submissions(read_submissions(paths.submissions)).values()
    ]
    give_up_at = time.monotonic() + JOBS_END_TIMEOUT_S
    while live:
        with contextlib.suppress(SlurmTimeoutError):  # the run itself is finished by now
            live = query_live_job_ids(live)
        if live and (time.monotonic() > give_up_at or stop.wait(2.0)):
            reporter.print_line(f"the run is finished; jobs are still ending: {', '.join(live)}")
            return
