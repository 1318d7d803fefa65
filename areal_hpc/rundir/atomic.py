"""Atomic, fsynced writes of files and directories."""

from __future__ import annotations

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Force one file to disk, or the names in one directory: new files and renames.

    Raises:
        OSError: The storage refused.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Force every file below, and the directories that name them, to disk."""
    for path in [*directory.rglob("*"), directory]:
        fsync_path(path)


def write_atomic(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Put a file in place so that after a crash it is there whole or not at all.

    Folders on the way to it are made.

    Raises:
        OSError: The storage refused; the old content, if any, still stands.
    """
    write_temporary(path, content, mode=mode).rename(path)
    fsync_path(path.parent)


def write_atomic_private(path: Path, content: bytes) -> None:
    """The same, for what only its owner may read."""
    write_atomic(path, content, mode=0o600)


def write_temporary(path: Path, content: bytes, *, mode: int = 0o644) -> Path:
    """The content in a hidden file next to `path`, durable but not in place yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return partial


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in place that readers on any node see whole or not at all. Not forced to disk.

    Raises:
        OSError: The storage refused; the old content, if any, still stands.
    """
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    partial.write_bytes(content)
    partial.rename(path)
