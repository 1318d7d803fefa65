"""What is written stays written: files and directories forced to disk. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from areal_hpc.errors import ClusterError


def sync_tree(directory: Path) -> None:
    """Force every file below, and the directories that name them, to disk."""
    for path in [*directory.rglob("*"), directory]:
        sync_path(path)


def sync_path(path: Path) -> None:
    """Force one file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit_refused(path: Path, reason: object) -> ClusterError:
    """The error of a commit that the storage did not take."""
    return ClusterError(
        f"a commit could not be written: {reason}",
        key=str(path),
        hint="make room on the shared storage, or check its quota with lfs quota or quota -s",
    )
