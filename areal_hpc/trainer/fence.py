"""What keeps a trainer that was replaced from leaving a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from areal_hpc.errors import ArealError
from areal_hpc.rundir.generations import read_newest_number


class SupersededError(ArealError):
    """A newer start of the trainer owns the run: this one must go without a trace."""

    exit_code = 143


def epoch_fence(epochs_dir: Path, epoch: int) -> Callable[[], None]:
    """A check, to be made before anything becomes visible to others.

    It raises SupersededError when a later epoch than `epoch` has been taken.
    """

    def fence() -> None:
        newest = read_newest_number(epochs_dir)
        if newest > epoch:
            raise SupersededError(f"epoch {newest} took over from epoch {epoch}")

    return fence
