"""What is written stays written: files and directories forced to disk. No torch."""

from __future__ import annotations

import os
from pathlib import Path


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
