"""Folders of a run: made by its processes, but never the run's own, which the launcher makes.

A run's folder may be moved while the run works, as people do when a quota fills. Processes that
made it anew would go on in an empty one, and what they seal there nobody reads. To another file
system it is moved file by file: a run is there as long as its recipe is.
"""

import errno
import os
from pathlib import Path

from areal_hpc.rundir.paths import RECIPE_FILE

MISSING_LOOKS = 3
"""Looks in a row at which a folder is missing until it counts as gone: storage may be late."""
_mark_by_run_dir: dict[Path, Path] = {}


def forbid_making(run_dir: Path) -> None:
    _mark_by_run_dir[run_dir] = find_mark(run_dir)


def find_mark(run_dir: Path) -> Path:
    recipe = run_dir / RECIPE_FILE
    return recipe if recipe.exists() else run_dir


def make_folder(folder: Path) -> None:
    """Make a folder, and those that lead to it, unless it is there.

    Raises:
        OSError: The storage refused, or the run's own folder is gone.
    """
    for run_dir, mark in _mark_by_run_dir.items():
        if folder.is_relative_to(run_dir) and not mark.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run_dir))
    folder.mkdir(parents=True, exist_ok=True)


class RunDirWatch:
    """Watches for the end of a run's folder, from time to time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._mark = find_mark(run_dir)
        self._missing = 0

    @property
    def is_missing(self) -> bool:
        """It was missing at the last look."""
        return self._missing > 0

    def is_gone(self, looks: int = MISSING_LOOKS) -> bool:
        """True once it was missing at so many looks in a row, this one included."""
        if self._mark.exists():
            self._missing = 0
            return False
        self._run_dir.parent.stat()  # raises while the storage is away
        self._missing += 1
        return self._missing >= looks
