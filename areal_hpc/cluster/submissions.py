"""The jobs of a run as they were handed to Slurm: one line each, appended, never changed."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from areal_hpc.rundir.jsonl import append_line, read_lines


class Submission(Struct, frozen=True):
    """One job id that Slurm gave out. A requeue keeps the id and adds no line."""

    job: str
    """Name within the run: `trainer`, `cell-0`, `warmup`."""
    job_id: str
    """Slurm's; `123_4` for a member of an array."""
    attempt: int
    """The run's attempt, which also names the folder of its logs."""
    submitted_at: float
    """Unix time, seconds."""
    script: str
    """The sbatch script."""


def record_submission(path: Path, submission: Submission) -> None:
    """Append one line, whole or not at all.

    Raises:
        OSError: The storage refused it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, submission)


def read_submissions(path: Path) -> list[Submission]:
    """All jobs that were ever submitted, oldest first; none before the first."""
    return read_lines(path, Submission)


def newest_of_each(submissions: list[Submission]) -> dict[str, Submission]:
    """The submission that counts for each name: the last one."""
    return {submission.job: submission for submission in submissions}
