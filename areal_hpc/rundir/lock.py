"""Lock of a run: held by its launcher, looked at by its local jobs and by read-only tools."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_hpc.errors import ClusterError

LOCK_ACQUIRE_TIMEOUT_S = 1.0
"""Longest that a lock is waited for: `is_lock_held` holds it for a moment."""


@contextmanager
def hold_lock_or_raise(lock_file: Path) -> Iterator[None]:
    """Hold the launcher's lock. The kernel drops it however the launcher ends.

    Raises:
        ClusterError: Another launcher holds it.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock_exclusively(descriptor, lock_file)
        yield
    finally:
        os.close(descriptor)


def _lock_exclusively(descriptor: int, lock_file: Path) -> None:
    give_up_at = time.monotonic() + LOCK_ACQUIRE_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= give_up_at:
                raise ClusterError(
                    "another process is running this recipe",
                    key=str(lock_file.parent),
                    hint=f"lsof {lock_file}",
                ) from error
        time.sleep(LOCK_ACQUIRE_TIMEOUT_S / 20)


def is_lock_held(lock_file: str | os.PathLike[str]) -> bool:
    """True while a launcher holds this lock. Seen across nodes where the file system has locks."""
    try:
        descriptor = os.open(lock_file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
