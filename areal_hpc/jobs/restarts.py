"""Restart policy of failed processes and jobs, and the common restart of all ranks.

Four parties use the policy: a task's supervisor for its processes, a cell for its replicas, a job
under Slurm for itself, and the local launcher for its jobs.

A rank that dies breaks the collectives of all others, so all ranks start again within the living
job. A supervisor that sees its rank die creates the next numbered note exclusively. One supervisor
succeeds, and its rank is the cause. All follow the note: each kills its rank and starts it again.
"""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from areal_hpc.errors import AgentError, ClusterError, JobFailedError, RecipeError
from areal_hpc.rundir.files import get_number_path, make_folder, write_atomic
from areal_hpc.rundir.jobs import IDLE_EXIT_CODE, TaskExit
from areal_hpc.wire.decoding import decode_json

RestartDecision = Literal["done", "restart", "continue_without", "idle", "fail"]
"""`idle`: start again once there is work."""
TIME_LIMIT_REASON = "close to the time limit"
"""Reason of a task that stops because its job is close to its time limit."""
PERMANENT_EXIT_CODES = frozenset({RecipeError.exit_code, AgentError.exit_code})
"""Exit codes of errors of the recipe, the agent or our own code, which another start would meet."""
MAX_TIME_LIMIT_STOPS = 3
"""Consecutive starts that reach the time limit without progress, after which it is too short."""


class FailuresWithoutProgress(Struct, frozen=True):
    """Counts of a job's consecutive starts without progress of the run, the last one included."""

    failures: int = 0
    """Starts that crashed."""
    time_limit_stops: int = 0
    """Starts that stopped at their time limit."""
    unwritten_because: str = ""
    """Error that kept the counts from the disk; empty if they were written."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits for consecutive failures without progress that lead to another start."""

    max_failures: int
    max_cluster_failures: int | None = None
    """Limit for failures with the exit code of ClusterError alone; None: `max_failures`."""
    healthy_s: float = 600.0
    """Lifetime from which on a start counts as progress."""
    progress_excuses_failure: bool = False
    """Whether progress excuses the failure of its own start, too, and not only earlier ones."""

    def count_failures(
        self, failures_before: int, *, made_progress: bool, has_failed: bool = True
    ) -> int:
        """Count consecutive failures without progress after one more start.

        `has_failed` is False if the start's end was not its own fault.
        """
        if made_progress and self.progress_excuses_failure:
            return 0
        return (0 if made_progress else failures_before) + has_failed

    def decide(
        self, exit_codes: Collection[int], failures: int, *, is_dispensable: bool = False
    ) -> RestartDecision:
        """Decide after a failure with these exit codes, the last of `failures` without progress.

        If others can do the work (`is_dispensable`) "continue_without" takes the place of "fail".
        """
        if not PERMANENT_EXIT_CODES.isdisjoint(exit_codes):
            return "fail"
        allowed = self.max_failures
        if self.max_cluster_failures is not None and set(exit_codes) == {ClusterError.exit_code}:
            allowed = self.max_cluster_failures
        if failures <= allowed:
            return "restart"
        return "continue_without" if is_dispensable else "fail"


SLURM_JOB_RESTART_POLICY = RestartPolicy(1, max_cluster_failures=2, progress_excuses_failure=True)
"""Policy for a job under Slurm, where progress means that the run's metrics grew."""


def decide_restart(
    outcomes: Sequence[TaskExit], counts: FailuresWithoutProgress
) -> RestartDecision:
    """Decide about a job under Slurm by the exits of its tasks."""
    codes = {outcome.exit_code for outcome in outcomes} - {0}
    if not codes:
        return "done"
    if not PERMANENT_EXIT_CODES.isdisjoint(codes):
        return "fail"
    crashes = {outcome.exit_code for outcome in outcomes if outcome.is_crash}
    if not crashes and IDLE_EXIT_CODE in codes:
        return "idle"
    if not crashes and counts.time_limit_stops >= MAX_TIME_LIMIT_STOPS:
        return "fail"
    if not crashes or any(outcome.faulty_node for outcome in outcomes):
        return "restart"
    if counts.unwritten_because:  # else nothing would bound the starts
        return "fail"
    return SLURM_JOB_RESTART_POLICY.decide(crashes, counts.failures)


def find_crash_error(job: str, outcomes: Sequence[TaskExit]) -> JobFailedError | None:
    """Return the first crash among a job's outcomes as an error; None if there is none."""
    for outcome in outcomes:
        if outcome.is_crash:
            if outcome.says_why:
                return JobFailedError(outcome.reason, code=outcome.exit_code)
            return JobFailedError(
                f"{outcome.process} of job {job} failed with exit code "
                f"{outcome.exit_code}:\n"
                f"{outcome.reason}",
                key=outcome.log,
                hint="read that log; run the same command again to resume",
                code=outcome.exit_code,
            )
    return None


class RankRestart(msgspec.Struct, frozen=True):
    """Note of a restart, with its cause."""

    task: int
    """Task whose rank died first."""
    exit_code: int
    failures: int
    """Consecutive deaths without progress, this one included."""


class RankRestartNotes:
    """Restart notes of one start of a job, as one of its supervisors follows them."""

    def __init__(self, folder: Path, poll_s: float) -> None:
        self._folder = folder
        self._poll_s = poll_s
        self._next_look_at = 0.0
        self.followed = 0
        """Restarts that this task has taken part in."""

    def read_next_restart(self, *, is_urgent: bool = False) -> RankRestart | None:
        """Read the next restart to take part in; None if there is none, or before the next look."""
        now = time.monotonic()
        if now < self._next_look_at and not is_urgent:
            return None
        self._next_look_at = now + self._poll_s
        try:
            content = get_number_path(self._folder, self.followed + 1).read_bytes()
        except FileNotFoundError:
            return None
        if not content:  # it is empty for a moment
            return None
        note = decode_json(content, RankRestart)
        self.followed += 1
        return note

    def announce_restart(self, restart_note: RankRestart) -> bool:
        """Make all tasks start their rank again; return whether this task was first to announce."""
        make_folder(self._folder)
        path = get_number_path(self._folder, self.followed + 1)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        write_atomic(path, msgspec.json.encode(restart_note))
        return True
