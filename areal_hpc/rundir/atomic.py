"""Atomic, fsynced writes of files and directories."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from areal_hpc.rundir.folders import make_folder


def fsync_path(path: Path) -> None:
    """Force one file to disk, or the names in one directory: new files and renames."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        fsync_path(path)


def write_atomic(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Put a file in place that readers, also after a crash, see whole or not at all.

    Folders on the way to it are made.
    """
    write_temporary(path, content, mode=mode).rename(path)
    fsync_path(path.parent)


def write_once(path: Path, content: bytes) -> bool:
    """Put a file in place as `write_atomic` does, unless one is there; False if one was."""
    partial = write_temporary(path, content)
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        return False
    finally:
        partial.unlink()
    fsync_path(path.parent)
    return True


def write_atomic_private(path: Path, content: bytes) -> None:
    write_atomic(path, content, mode=0o600)


def write_temporary(path: Path, content: bytes, *, mode: int = 0o644) -> Path:
    with open_temporary_beside(path, mode=mode) as stream:
        stream.write(content)
    return Path(stream.name)


@contextmanager
def open_temporary_beside(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A hidden file next to `path` to write to, durable at the end; an error leaves no file."""
    make_folder(path.parent)
    # The node is part of the name: on shared storage two processes may have the same number.
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:  # boundary: whatever ended the block is raised again
        partial.unlink(missing_ok=True)
        raise
