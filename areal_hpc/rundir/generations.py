"""Numbered starts of a trainer or a job: each takes the next number, exclusively."""

import os
from collections.abc import Callable
from pathlib import Path

from areal_hpc.errors import SupersededTrainerError
from areal_hpc.rundir.folders import make_folder


def claim_next_number(directory: Path) -> int:
    """Create the next numbered file (O_EXCL) and return its number, counted from 1.

    Two trainers that start at once get two numbers; the lower one is thereby fenced.
    """
    make_folder(directory)
    number = read_newest_number(directory) + 1
    while True:
        try:
            descriptor = os.open(
                get_number_path(directory, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644
            )
        except FileExistsError:
            number += 1
            continue
        os.close(descriptor)
        return number


def read_newest_number(directory: Path) -> int:
    """The highest number taken so far; 0 before the first."""
    if not directory.is_dir():
        return 0
    return max(
        (int(entry.name) for entry in directory.iterdir() if entry.name.isdigit()), default=0
    )


def get_number_path(directory: Path, start_number: int, suffix: str = "") -> Path:
    return directory / f"{start_number:04d}{suffix}"


def make_check_raising_if_superseded(directory: Path, generation: int) -> Callable[[], None]:
    """A check, to be made before anything becomes visible to others.

    It raises SupersededTrainerError when a later generation than `generation` has begun.
    """

    def check() -> None:
        newest = read_newest_number(directory)
        if newest > generation:
            raise SupersededTrainerError(
                f"generation {newest} took over from generation {generation}"
            )

    return check
