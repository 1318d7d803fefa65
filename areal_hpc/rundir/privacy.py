"""Who may read and write a run directory.

Whoever can write there runs code as the run's owner at its next start, and whoever can read there
has the tasks and their answers. So only the owner writes, and keys are for the owner alone.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from areal_hpc.errors import RecipeError

Readers = Literal["owner", "group"]
UMASKS: dict[Readers, int] = {"owner": 0o077, "group": 0o027}
"""What new files do not allow."""


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
