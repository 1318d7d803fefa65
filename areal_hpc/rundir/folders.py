"""Folders of a run: made by its processes, but never the run's own, which the launcher makes.

A run's folder may be moved while the run works, as people do when a quota fills. Processes that
made it anew would go on in an empty one, and what they seal there nobody reads. To another file
system it is moved file by file: a run is there as long as its recipe is.

Whoever can write in a run directory runs code as the run's owner at its next start, and whoever can
read there has the tasks and their answers. So only the owner writes, and keys are for the owner
alone.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RECIPE_FILE

Readers = Literal["owner", "group"]
UMASKS: dict[Readers, int] = {"owner": 0o077, "group": 0o027}
"""What new files do not allow."""
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


@contextmanager
def restrict_new_files(readable_by: Readers) -> Iterator[None]:
    """New files are for these readers alone, also those of processes started in the context."""
    before = os.umask(UMASKS[readable_by])
    try:
        yield
    finally:
        os.umask(before)


def create_or_secure_run_dir(root: Path, readable_by: Readers) -> None:
    """Make a run directory that its owner alone can write to, or make such a one of what is there.

    Raises:
        RecipeError: It belongs to another user, or its storage keeps no such modes.
    """
    root.mkdir(parents=True, exist_ok=True)
    status = root.stat()
    hint = "choose another cluster.fileroot, experiment_name or trial_name"
    if status.st_uid != os.getuid():
        problem = f"the run directory belongs to user {status.st_uid}, expected {os.getuid()}"
        raise RecipeError(problem, key=str(root), hint=hint)
    wanted = 0o777 & ~UMASKS[readable_by]
    if stat.S_IMODE(status.st_mode) & 0o777 != wanted:
        root.chmod(wanted | stat.S_IMODE(status.st_mode) & stat.S_ISGID)
        found = stat.S_IMODE(root.stat().st_mode) & 0o777
        if found != wanted:
            problem = f"the run directory has mode {found:04o}, expected {wanted:04o}"
            raise RecipeError(f"{problem}: its storage keeps no modes", key=str(root), hint=hint)
