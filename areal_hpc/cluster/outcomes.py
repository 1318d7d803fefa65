"""How the tasks of a job ended: one small file each, in the job's folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from areal_hpc.rundir.jobs import TaskExit


def write_outcome(job_dir: Path, rank: int, outcome: TaskExit) -> None:
    """Leave a task's last word: whole or not at all, as others look often."""
    path = job_dir / f"outcome.{rank}.json"
    partial = path.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.encode(outcome))
    partial.rename(path)


def read_outcome(job_dir: Path, rank: int, incarnation: str) -> TaskExit | None:
    """What a task of one start of a job ended with; None while it has not."""
    try:
        content = (job_dir / f"outcome.{rank}.json").read_bytes()
    except FileNotFoundError:
        return None
    outcome = msgspec.json.decode(content, type=TaskExit)
    return outcome if outcome.incarnation == incarnation else None
