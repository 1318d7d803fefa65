"""Restarts: what to do about a process or a job that failed, and how all ranks start again.

Four ask the policy: the supervisor of a task about its processes, a cell about its replicas, a job
under Slurm about itself, and the local launcher about its jobs.

A rank that dies breaks the collectives of all others, so all start again within the living job.
The supervisor that sees a rank die writes the next numbered note, exclusively: one of them
succeeds, and its rank is the cause. All follow the note, each by killing its rank and starting it
again.
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
"""It is done; start it again; go on without it; start it again once there is work; give up."""
TIME_LIMIT_REASON = "close to the time limit"
"""Reason of a task that stops because its job's time is up."""
PERMANENT_EXIT_CODES = frozenset({RecipeError.exit_code, AgentError.exit_code})
"""Of errors of the recipe, the agent or our own code: another start would end the same way."""
MAX_TIME_LIMIT_STOPS = 3
"""Starts in a row that reach the time limit without progress: the limit is too short."""


class FailuresWithoutProgress(Struct, frozen=True):
    """Starts of a job in a row, the last one included, in which the run made no progress."""

    failures: int = 0
    """Those that crashed."""
    time_limit_stops: int = 0
    """Those that were stopped at their time limit."""
    unwritten_because: str = ""
    """Why the next start will not know of this one; empty if it will."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Failures in a row, without progress between them, that are answered by another start."""

    max_failures: int
    max_cluster_failures: int | None = None
    """Limit for failures with the exit code of ClusterError alone; None: `max_failures`."""
    healthy_s: float = 600.0
    """A start that lived this long made progress, whatever the run did meanwhile."""
    progress_excuses_failure: bool = False
    """Progress excuses the failure of its own start too, not only those before it."""

    def count_failures(
        self, failures_before: int, *, made_progress: bool, has_failed: bool = True
    ) -> int:
        """Failures in a row without progress, after one more start than `failures_before`.

        It has not failed if its end was not its fault.
        """
        if made_progress and self.progress_excuses_failure:
            return 0
        return (0 if made_progress else failures_before) + has_failed

    def decide(
        self, exit_codes: Collection[int], failures: int, *, is_dispensable: bool = False
    ) -> RestartDecision:
        """Decision after failures with these exit codes, so many in a row without progress.

        What is dispensable has others that can do its work.
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
"""Of a job under Slurm. Progress: the run's metrics grew."""


def decide_restart(
    outcomes: Sequence[TaskExit], counts: FailuresWithoutProgress
) -> RestartDecision:
    """Decision about a job under Slurm, from the ends of its tasks."""
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
    """The crash that a job's outcomes tell of, if they do."""
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
    """The note of one restart: why it came about."""

    task: int
    """Where the rank died that died first."""
    exit_code: int
    failures: int
    """Deaths in a row without progress, this one included."""


class RankRestartNotes:
    """The notes of one start of a job, as one of its supervisors follows them."""

    def __init__(self, folder: Path, poll_s: float) -> None:
        self._folder = folder
        self._poll_s = poll_s
        self._next_look_at = 0.0
        self.followed = 0
        """Restarts that this task has taken part in."""

    def read_next_restart(self, *, is_urgent: bool = False) -> RankRestart | None:
        """The next restart to take part in; None while there is none, or before the next look."""
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
        """Have all tasks start their rank again; false if another task was first to say so."""
        make_folder(self._folder)
        path = get_number_path(self._folder, self.followed + 1)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        write_atomic(path, msgspec.json.encode(restart_note))
        return True
