"""Lock of a run, claim of its submission, and note of a launcher in an allocation.

A launcher holds the lock; its local jobs and read-only tools look at it. Locks of NFS and Lustre
may not reach other nodes. A claim does: it is a file that only one process can create. The note of
a launcher in an allocation names the nodes of its steps and is its heartbeat.
"""

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct, field

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.decoding import decode_json

LOCK_ACQUIRE_TIMEOUT_S = 1.0
"""Longest wait for the lock, which `is_lock_held` holds for a moment."""
CLAIM_LIFETIME_S = 900.0
"""Age beyond which a claim belongs to a process that died."""


@contextmanager
def hold_lock(lock_file: Path) -> Iterator[None]:
    """Hold the launcher's lock. The kernel releases it however the launcher ends."""
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
    """Return whether a launcher holds this lock, across nodes if the file system has such locks."""
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
        The claimant that holds it already; empty if this process holds it now.
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
        if _read_claim(path) == content:  # else it expired, and another process holds it
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
def claim_submission(path: Path) -> Iterator[None]:
    """Keep launchers on other hosts from submitting a run; the caller holds this host's lock.

    Raises:
        ClusterError: A launcher on another host or a caretaker submits, or was killed meanwhile.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]  # hosts may have equal names
    launcher = f"a launcher on {socket.gethostname()} ({boot})"
    if _read_claim(path).startswith(f"{launcher}\n"):
        path.unlink(missing_ok=True)  # its owner died: a live one would hold the lock
    with claim(path, launcher) as claimant:
        if claimant:
            raise ClusterError(
                f"{claimant} is submitting jobs of this run",
                key=str(path.parent),
                hint=f"try again in a minute; if it was killed there: rm {path}*",
            )
        yield


HEARTBEAT_PERIOD_S = 5.0
LAUNCHER_HEARTBEAT_TIMEOUT_S = 60.0
"""Silence after which a launcher counts as gone and its steps stop."""


class StepNote(Struct, frozen=True):
    job: str
    step: str
    """Name of the step in Slurm."""
    nodes: tuple[str, ...]


class AllocationNote(Struct, frozen=True):
    job_id: str
    """Job id of the allocation."""
    beat: int
    """Number of times that the launcher has written the note."""
    steps: list[StepNote] = field(default_factory=list)
    """Steps that run."""


def write_allocation_note(paths: RunPaths, note: AllocationNote) -> None:
    write_atomic(paths.allocation_note, msgspec.json.encode(note))


def find_live_launcher_note(paths: RunPaths) -> AllocationNote | None:
    """Return the note of a launcher that is alive, or was a moment ago; None without one."""
    try:
        if time.time() - paths.allocation_note.stat().st_mtime > LAUNCHER_HEARTBEAT_TIMEOUT_S:
            return None
        return decode_json(paths.allocation_note.read_bytes(), AllocationNote)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def check_no_live_launcher(
    paths: RunPaths, print_line: Callable[[str], None], watch_s: float = 2.5 * HEARTBEAT_PERIOD_S
) -> None:
    """Check that no launcher in an allocation works in a run directory.

    The lock shows the same where the file system's locks reach other nodes. A fresh note may be
    of a launcher that was killed, so it is watched for a while.

    Raises:
        ClusterError: A launcher works there.
    """
    if (first := find_live_launcher_note(paths)) is None:
        return
    print_line(f"waiting  a launcher in allocation {first.job_id} was here within the last minute")
    give_up_at = time.monotonic() + watch_s
    while time.monotonic() < give_up_at:
        time.sleep(min(watch_s / 10, 1.0))
        note = find_live_launcher_note(paths)
        if note is not None and note != first:
            raise ClusterError(
                f"a launcher in allocation {note.job_id} is running this recipe",
                key=str(paths.root),
                hint=f"wait for its end, or end the allocation: scancel {note.job_id}",
            )
