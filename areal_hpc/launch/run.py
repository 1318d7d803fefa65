"""Implementation of `areal_hpc.run` and `areal_hpc.submit`, and of the commands of these names."""

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_hpc.errors import (
    ClusterError,
    JobFailedError,
    RunInterruptedError,
    SlurmTimeoutError,
)
from areal_hpc.jobs import caretaker
from areal_hpc.jobs.processes.process_setup import catch_stop_signals
from areal_hpc.jobs.restarts import find_crash_error
from areal_hpc.launch import foreground_launcher, slurm_launcher
from areal_hpc.launch.foreground_launcher import STOPPING_MESSAGE, ProgressReporter
from areal_hpc.launch.plan import JobStage, StagePlanner, plan_run
from areal_hpc.launch.prepare import check_finished_recipe, is_run_finished
from areal_hpc.recipe.loading import load_recipe, merge_overrides
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
from areal_hpc.slurm.scontrol import read_allocation
from areal_hpc.view.formatting import format_next_command, get_program_command, say
from areal_hpc.view.state.live_progress import open_progress_reporter
from areal_hpc.view.state.run_view import RunView
from areal_hpc.view.state.summary import summarize_run

FRESH_HINT = "use --fresh to start over"


@dataclass(frozen=True, slots=True)
class RunResult:
    """State of a run when `run` or `submit` returns. They raise an error if a job fails."""

    run_dir: Path
    """Directory of the run, absolute."""
    exit_reason: Literal["finished", "interrupted", "submitted"]
    """`interrupted`: SIGINT or SIGTERM stopped `run`, or ended the waiting of `submit` while the
    jobs continue. `submitted`: the jobs are queued, and `submit` did not wait for them."""
    step: int
    """Last trained step; 0 before the first."""
    reward: float | None
    """Mean training reward of that step; None before the first."""
    heldout_reward: float | None
    """Mean reward of the newest evaluation on held-out tasks; None before the first."""
    metrics: Mapping[str, Any]
    """Last line of `metrics.jsonl`, by metric name; empty before the first."""

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return RunInterruptedError.exit_code if self.exit_reason == "interrupted" else 0


def run(
    recipe: Recipe | Path | str,
    *,
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    notes: Sequence[str] = (),
    new_run_hint: str = FRESH_HINT,
    in_allocation: bool = False,
    **overrides: Any,
) -> RunResult:
    """Train a recipe in the foreground from its last checkpoint to its end, and show the progress.

    Args:
        recipe: A recipe, or the path of one.
        fresh: Move an earlier run aside first.
        sys_path: Folders from which the user's code is imported, beside the current one.
        notes: Lines to print first.
        new_run_hint: How to start a new run; printed if this one is already finished.
        in_allocation: Run jobs as steps of the Slurm allocation that this process runs in.
        overrides: Keys of the recipe, such as `trainer={"total_steps": 2}`.

    Raises:
        RecipeError: Something that the recipe names is missing or wrong; lists all problems.
        ClusterError: Another launcher works in this run directory, or the allocation ends.
        JobFailedError: A job failed for good.
    """
    recipe = load_with_overrides(recipe, overrides)
    paths = RunPaths(recipe.run_dir.resolve())
    if not fresh and report_finished_run(recipe, paths, new_run_hint):
        return _read_run_result(paths, "finished")
    allocation = read_allocation(os.environ) if in_allocation else None
    lengths = recipe.trainer.total_steps, recipe.sft.total_steps if recipe.sft else 0
    try:
        with (
            catch_stop_signals(STOPPING_MESSAGE) as stop,
            open_progress_reporter(paths, *lengths) as reporter,
        ):
            for note in (*notes, f"run      {paths.root}"):
                reporter.print_line(note)
            foreground_launcher.run(
                recipe,
                reporter=reporter,
                stop=stop,
                fresh=fresh,
                sys_path=sys_path,
                allocation=allocation,
            )
    except RunInterruptedError:
        print("stopped; run the same command again to resume")
        return _read_run_result(paths, "interrupted")
    return _report_end(paths)


def submit(
    recipe: Recipe | Path | str,
    *,
    wait: bool = False,
    after: Sequence[str] = (),
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    notes: Sequence[str] = (),
    new_run_hint: str = FRESH_HINT,
    **overrides: Any,
) -> RunResult:
    """Submit the remaining jobs of a run to Slurm; with `wait` also show its progress.

    With `wait` it returns when the run ends, or at Ctrl-C. `after` are the ids of Slurm jobs that
    must succeed before this run starts. The other arguments are those of `run`.

    Raises:
        RecipeError: Something that the recipe names is missing or wrong, or Slurm refuses a job.
        ClusterError: There is no Slurm here, or jobs of the run are pending or running.
        JobFailedError: A job failed for good during the wait.
    """
    recipe = load_with_overrides(recipe, overrides)
    paths = RunPaths(recipe.run_dir.resolve())
    if not fresh and report_finished_run(recipe, paths, new_run_hint):
        return _read_run_result(paths, "finished")
    for note in (*notes, f"run      {paths.root}"):
        say(note)
    slurm_launcher.submit(recipe, print_line=say, after=after, fresh=fresh, sys_path=sys_path)
    if not wait:
        say(f"next     {format_next_command('status', paths)}\n         squeue --me")
        return _read_run_result(paths, "submitted")
    try:
        lengths = recipe.trainer.total_steps, recipe.sft.total_steps if recipe.sft else 0
        with catch_stop_signals() as stop, open_progress_reporter(paths, *lengths) as reporter:
            watch_submitted_run(recipe, paths, reporter, stop)
    except RunInterruptedError:
        print(f"detached; jobs keep running: {format_next_command('status', paths)}")
        return _read_run_result(paths, "interrupted")
    return _report_end(paths)


def report_finished_run(recipe: Recipe, paths: RunPaths, new_run_hint: str = FRESH_HINT) -> bool:
    """Return whether a run is finished, and print its summary then.

    Raises:
        RecipeError: Another recipe trained the finished run.
    """
    if not is_run_finished(recipe, paths):
        return False
    check_finished_recipe(recipe, paths)
    print(summarize_run(RunView(paths), get_program_command()))
    print(f"\nthis run is finished; {new_run_hint}")
    return True


def load_with_overrides(recipe: Recipe | Path | str, overrides: Mapping[str, Any]) -> Recipe:
    """Load a recipe with other values of its keys; strings in them are not parsed as YAML."""
    texts = {key: json.dumps(value, default=str) for key, value in overrides.items()}
    if isinstance(recipe, Recipe):
        assignments = [f"{key}={text}" for key, text in texts.items()]
        return merge_overrides(recipe, assignments) if assignments else recipe
    # Strings from Python are literal: escape `${`, which OmegaConf would interpolate, by a
    # backslash, and double the backslashes before it.
    escaped = {key: re.sub(r"(\\*)\$\{", r"\1\1\\\\${", text) for key, text in texts.items()}
    return load_recipe(recipe, [f"{key}={text}" for key, text in escaped.items()])


def _report_end(paths: RunPaths) -> RunResult:
    print(summarize_run(RunView(paths), get_program_command()))
    return _read_run_result(paths, "finished")


def _read_run_result(
    paths: RunPaths, exit_reason: Literal["finished", "interrupted", "submitted"]
) -> RunResult:
    view = RunView(paths)
    rows = view.sft if view.is_sft_alone else view.steps
    last = rows[-1] if rows else {}
    evaluations = view.evaluations
    return RunResult(
        paths.root,
        exit_reason,
        step=last.get("step", 0),
        reward=last.get("reward/mean"),
        heldout_reward=evaluations[-1][1] if evaluations else None,
        metrics=last,
    )


RUN_FILES_POLL_S = 0.5
FIRST_QUEUE_POLL_S = 15.0
MAX_QUEUE_POLL_S = 60.0
CARETAKER_TIMEOUT_S = 3 * caretaker.POLL_S
"""Time until a caretaker has submitted the leading job again: two looks must miss the job."""
JOBS_END_TIMEOUT_S = 120.0
"""Time for jobs to end after the run's last step."""


def watch_submitted_run(
    recipe: Recipe,
    paths: RunPaths,
    reporter: ProgressReporter,
    stop: threading.Event,
    plan: StagePlanner = plan_run,
) -> None:
    """Show a submitted run's progress until it has ended and its jobs are gone."""
    poll_s, queried_at = FIRST_QUEUE_POLL_S, time.monotonic()
    gone_since: float | None = None
    while not paths.finished_marker.exists():
        stages = plan(recipe, paths, None)
        remaining = (stage for stage in stages if not stage.done_marker.exists())
        if (stage := next(remaining, None)) is None:
            break  # it has just finished
        reporter.show_progress(stage.name)
        if stop.wait(RUN_FILES_POLL_S):
            raise RunInterruptedError
        if time.monotonic() - queried_at < poll_s:
            continue
        queried_at = time.monotonic()
        if not _is_job_gone(paths, stage.leader.name):
            poll_s, gone_since = min(poll_s * 1.5, MAX_QUEUE_POLL_S), None
            continue
        # Query again soon: a caretaker may be submitting the job at this moment.
        poll_s = FIRST_QUEUE_POLL_S
        if gone_since is None:
            gone_since = queried_at
        elif (
            queried_at - gone_since >= _choose_absence_timeout_s(paths, stage)
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
        return False  # slurmctld may be down for a while


def _choose_absence_timeout_s(paths: RunPaths, stage: JobStage) -> float:
    exits = read_task_exits(paths.job(stage.leader.name)).values()
    if is_cancelled(paths.cancelled_marker) or any(task_exit.gave_up for task_exit in exits):
        return 0.0
    newest = get_latest_submissions(read_submissions(paths.submissions))
    others = [newest[job.name].job_id for job in stage.others if job.name in newest]
    waiting = [newest[CARETAKER_JOB].job_id] if CARETAKER_JOB in newest else []
    try:
        if query_live_job_ids(others):
            return CARETAKER_TIMEOUT_S
        return math.inf if query_live_job_ids(waiting) else 0.0  # it will submit them again
    except ClusterError:
        return CARETAKER_TIMEOUT_S  # slurmctld may be down for a while


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
    newest = get_latest_submissions(read_submissions(paths.submissions))
    live = [submission.job_id for submission in newest.values()]
    give_up_at = time.monotonic() + JOBS_END_TIMEOUT_S
    while live:
        with contextlib.suppress(SlurmTimeoutError):  # the run itself is already finished
            live = query_live_job_ids(live)
        if live and (time.monotonic() > give_up_at or stop.wait(2.0)):
            reporter.print_line(f"the run is finished; jobs are still ending: {', '.join(live)}")
            return
