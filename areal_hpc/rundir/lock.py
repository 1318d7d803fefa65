"""Lock of a run: held by its launcher, looked at by its local jobs and by read-only tools.

Locks of NFS and Lustre may end at the node. A claim reaches every node: a file that only one
process can create.
"""

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_hpc.errors import ClusterError

LOCK_ACQUIRE_TIMEOUT_S = 1.0
"""Longest that a lock is waited for: `is_lock_held` holds it for a moment."""
CLAIM_LIFETIME_S = 900.0
"""A claim that is older was left by a process that died."""


@contextmanager
def hold_lock_or_raise(lock_file: Path) -> Iterator[None]:
    """Hold the launcher's lock. The kernel drops it however the launcher ends."""
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


@contextmanager
def claim(path: Path, claimant: str) -> Iterator[str]:
    """Create a file that only one process can create, and remove it at the end.

    Yields:
        The claimant that has it already; empty if this one has it now.
    """
    _remove_dead_claim(path)
    content = f"{claimant}\n{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        yield _read_claim(path).partition("\n")[0] or "another process"
        return
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        yield ""
    finally:
        if _read_claim(path) == content:  # else it took so long that another process has it
            path.unlink(missing_ok=True)


def _read_claim(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _remove_dead_claim(path: Path) -> None:
    if not _is_too_old(path):
        return
    removal = path.with_name(f"{path.name}.removal")
    try:
        os.close(os.open(removal, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    try:
        if _is_too_old(path):  # still
            path.unlink(missing_ok=True)
    finally:
        removal.unlink(missing_ok=True)


def _is_too_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > CLAIM_LIFETIME_S
    except FileNotFoundError:
        return False


@contextmanager
def claim_submission_or_raise(path: Path) -> Iterator[None]:
    """Keep launchers on other hosts from submitting a run; the caller has the lock of this one.

    Raises:
        ClusterError: A launcher on another host, or a caretaker, is at it, or was killed there.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]  # hosts may have equal names
    launcher = f"a launcher on {socket.gethostname()} ({boot})"
    if _read_claim(path).startswith(f"{launcher}\n"):
        path.unlink(missing_ok=True)  # it is dead: it would have the lock
    with claim(path, launcher) as claimant:
        if claimant:
            raise ClusterError(
                f"{claimant} is submitting jobs of this run",
                key=str(path.parent),
                hint=f"try again in a minute; if it was killed there: rm {path}*",
            )
        yield
