"""Foreground launcher: it runs a plan's jobs here or in an allocation, and restarts failed jobs."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_hpc.errors import ClusterError, JobFailedError, RunInterruptedError
from areal_hpc.jobs.config import get_interpreters
from areal_hpc.jobs.processes.process_setup import StopEvent
from areal_hpc.jobs.requeue import read_progress_bytes
from areal_hpc.jobs.restarts import RestartPolicy, find_crash_error
from areal_hpc.jobs.starts import read_checkpoint_duration_s
from areal_hpc.launch.job_places import (
    AllocationEndError,
    HeldAllocation,
    ThisMachine,
    find_allocation_shortages,
    find_gpu_problems,
)
from areal_hpc.launch.plan import JobStage, StagePlanner, plan_run
from areal_hpc.launch.prepare import (
    PreparedRun,
    create_attempt_log_dir,
    prepare_run,
)
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.files import StorageErrorTolerance
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.rundir.lock import hold_lock
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import CELL_PREFIX, EVALUATION_CELL
from areal_hpc.rundir.telemetry.events import LAUNCHER_ENDED_EVENT, LAUNCHER_ROLE, EventLog
from areal_hpc.slurm.scontrol import Allocation
from areal_hpc.slurm.submit import JobHandle, stop_jobs

POLL_S = 0.5
STOP_MARGIN_S = 3.0
"""Time beyond a job's own grace time before the launcher kills it."""
STOPPING_MESSAGE = (
    "\nstopping: jobs save a checkpoint if there is time; the last one is kept in any case.\n"
    "Ctrl-C again ends them at once"
)
LOCAL_RESTART_POLICY = RestartPolicy(0, max_cluster_failures=2, progress_excuses_failure=True)
"""Policy for jobs on this machine. `job_made_progress` defines progress."""


class ProgressReporter(Protocol):
    """Display of a run's progress for a person."""

    def print_line(self, message: str) -> None:
        """Print a permanent line."""

    def show_progress(self, stage: str) -> None:
        """Refresh the progress display; the launcher calls this several times a second."""


def run(
    recipe: Recipe,
    *,
    reporter: ProgressReporter,
    stop: StopEvent,
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    allocation: Allocation | None = None,
    plan: StagePlanner = plan_run,
) -> None:
    """Run a recipe from its last checkpoint to its end; `stop` stops all jobs.

    Jobs run on this machine, or as steps of `allocation`.

    Raises:
        RecipeError: Something that the recipe names is missing or wrong; lists all problems.
        ClusterError: Another launcher works in this run directory, or the allocation ends.
        JobFailedError: A job failed for good.
        RunInterruptedError: `stop` was set.
    """
    if allocation is None:
        stages = plan(recipe, RunPaths(recipe.run_dir), None)
        problems = find_gpu_problems(recipe, os.environ, stages)
    else:
        problems = find_allocation_shortages(recipe, allocation)
    with prepare_run(
        recipe,
        print_line=reporter.print_line,
        fresh=fresh,
        sys_path=sys_path,
        known_problems=problems,
        plan=plan,
    ) as ready:
        events = EventLog(ready.paths.events, LAUNCHER_ROLE)
        end_reason = ""
        place = ThisMachine(recipe, ready)
        if allocation is not None:
            place = HeldAllocation(recipe, ready, allocation)
        try:
            with place:
                for stage in ready.remaining_stages:
                    if stop.is_set():
                        raise RunInterruptedError
                    ForegroundLauncher(recipe, ready, reporter, stop, place).run_stage_jobs(stage)
        except AllocationEndError as error:
            end_reason = error.problems[0].message
            raise
        finally:  # a killed launcher leaves no such event
            events.record(LAUNCHER_ENDED_EVENT, signal=stop.signal_name, reason=end_reason)


def run_standalone_stage(
    stage: JobStage,
    recipe: Recipe,
    paths: RunPaths,
    *,
    reporter: ProgressReporter,
    stop: StopEvent,
) -> None:
    """Run a stage outside a run's plan, in a directory that is already prepared."""
    with hold_lock(paths.lock):
        pythons = get_interpreters(recipe)
        ready = PreparedRun(paths, create_attempt_log_dir(paths), pythons, (stage,))
        ForegroundLauncher(
            recipe, ready, reporter, stop, ThisMachine(recipe, ready)
        ).run_stage_jobs(stage)


def read_progress(stage: JobStage, paths: RunPaths) -> int:
    """Return the size of the stage's own file of progress, or else the run's last step."""
    if stage.progress is not None:
        return read_progress_bytes(str(stage.progress))
    rows = read_metrics(paths.metrics)
    return int(rows[-1]["step"]) if rows else -1


def job_made_progress(
    job: str, *, steps_taken: int, steps_left: int, lived_s: float, is_leader: bool = False
) -> bool:
    """Return whether a job did some of its work in the `lived_s` since its submission. Pure.

    `steps_taken` is what `read_progress` has grown by since then.
    """
    if job == EVALUATION_CELL and steps_left > 0 and not is_leader:
        return True  # its loss delays nothing before the last step
    is_cell = job == EVALUATION_CELL or job.startswith(CELL_PREFIX)
    return steps_taken > 0 or (is_cell and lived_s >= LOCAL_RESTART_POLICY.healthy_s)


@dataclass(slots=True)
class _JobInProgress:
    spec: JobSpec
    handle: JobHandle
    progress_at_submission: int
    """Progress of the job's stage when the job was submitted."""
    submitted_at: float
    failures: int = 0
    """Consecutive submissions that failed without progress."""


class ForegroundLauncher:
    """Launcher that submits the jobs of a stage and waits until they are done."""

    def __init__(
        self,
        recipe: Recipe,
        prepared_run: PreparedRun,
        reporter: ProgressReporter,
        stop: StopEvent,
        job_place: ThisMachine,
    ) -> None:
        self._recipe = recipe
        self._paths = prepared_run.paths
        self._log_dir = prepared_run.paths.log_dir(prepared_run.attempt)
        self._reporter = reporter
        self._stop = stop
        self._place = job_place
        self._events = EventLog(prepared_run.paths.events, LAUNCHER_ROLE)
        self._jobs: list[_JobInProgress] = []

    def run_stage_jobs(self, stage: JobStage) -> None:
        self._jobs = []
        for line in self._place.assign_stage(stage):
            self._reporter.print_line(line)
        try:
            for spec in stage.jobs:
                handle, progress = self._submit_job(spec), read_progress(stage, self._paths)
                self._jobs.append(_JobInProgress(spec, handle, progress, time.monotonic()))
            self._await_stage_end(stage)
        finally:
            jobs = (self._paths.job(spec.name) for spec in stage.jobs)
            grace_s = self._recipe.cluster.stop_grace_s + STOP_MARGIN_S
            grace_s += max(map(read_checkpoint_duration_s, jobs))
            handles = [job.handle for job in self._jobs]
            stop_jobs(handles, grace_s, is_urgent=lambda: self._stop.is_repeated)

    def _submit_job(self, spec: JobSpec) -> JobHandle:
        handle = self._place.submit_job(spec)
        self._events.record("job_submitted", job=spec.name, job_id=handle.start_id)
        return handle

    def _await_stage_end(self, stage: JobStage) -> None:
        storage = StorageErrorTolerance()
        is_over = False
        while not is_over:
            if self._stop.is_set():
                raise RunInterruptedError
            with storage.tolerate():
                self._place.check_time_left()
                is_over = self._poll_jobs(stage)
            time.sleep(POLL_S)

    def _poll_jobs(self, stage: JobStage) -> bool:
        self._reporter.show_progress(stage.name)
        if self._jobs[0].handle.is_done() and stage.done_marker.exists():
            return True
        for job in list(self._jobs):
            failure = find_job_failure(job.handle, self._log_dir)
            if failure is not None and not stage.done_marker.exists():
                self._place.check_place()
                self._handle_job_failure(stage, job, failure)
        return False

    def _handle_job_failure(
        self, stage: JobStage, job: _JobInProgress, failure: JobFailedError
    ) -> None:
        progress, now = read_progress(stage, self._paths), time.monotonic()
        progressed = job_made_progress(
            job.spec.name,
            steps_taken=progress - job.progress_at_submission,
            steps_left=self._recipe.trainer.total_steps - progress,
            lived_s=now - job.submitted_at,
            is_leader=job.spec is stage.leader,
        )
        job.failures = LOCAL_RESTART_POLICY.count_failures(job.failures, made_progress=progressed)
        names = [other.spec.name for other in self._jobs]
        cells = {name for name in names if name.startswith(CELL_PREFIX)}
        is_dispensable = job.spec.name in cells and len(cells) > 1
        decision = LOCAL_RESTART_POLICY.decide(
            [failure.code], job.failures, is_dispensable=is_dispensable
        )
        if decision == "fail":
            raise failure
        message = failure.problems[0].message.splitlines()[0].rstrip(":")
        job.handle.kill()
        if decision == "continue_without":
            self._reporter.print_line(f"{message}; the run goes on without this job")
            self._jobs.remove(job)
        else:
            self._reporter.print_line(f"{message}; this job is started again")
            job.handle = self._submit_job(job.spec)
            job.progress_at_submission, job.submitted_at = progress, now


def find_job_failure(handle: JobHandle, log_dir: Path) -> JobFailedError | None:
    """Return why a job has crashed, or has ended although its work is not done."""
    is_done = handle.is_done()  # checked first: exits are written before a job is done
    task_exits = handle.read_task_exits()
    if (crash := find_crash_error(handle.name, task_exits)) is not None or not is_done:
        return crash
    end, key = "before its work was done", log_dir / handle.name
    hint = "run the same command again to resume"
    if not task_exits:
        end, key = "without an exit status", handle.output_dir
        hint = "read the files in that folder"
    code = ClusterError.exit_code
    return JobFailedError(f"job {handle.name} ended {end}", key=str(key), hint=hint, code=code)
