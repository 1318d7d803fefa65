"""Checks of the file root: shared, POSIX semantics, space, quota."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn

MIN_FREE_BYTES = 1 << 30
RECOMMENDED_FREE_BYTES = 50 << 30
"""Below it a run of a real model has room for a few checkpoints only."""
MIN_FREE_INODES = 10_000
MAX_CLOCK_SKEW_S = 2.0
"""Between a file's time and this node's clock."""
LOCAL_KINDS = {"ext2/ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlayfs", "overlay", "zfs"}
"""File systems that other nodes see only if this node exports them."""


def check_storage(fileroot: Path) -> Iterator[CheckResult]:
    """Look at the file root from this node, in a folder that is removed again."""
    try:
        fileroot.mkdir(parents=True, exist_ok=True)
        folder = fileroot / f".doctor.{socket.gethostname()}.{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        yield fail(
            "file root",
            f"{fileroot} cannot be written: {error.strerror}",
            "cluster.fileroot=/a/path/on/shared/storage that you may write to",
        )
        return
    try:
        yield ok("file root", f"{fileroot} can be written")
        yield _kind(fileroot)
        yield from _promises(folder)
        yield _room(fileroot)
        yield from _quota()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kind(fileroot: Path) -> CheckResult:
    """What file system it is. Whether it is shared only another node can tell."""
    asked = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(fileroot)],
        capture_output=True,
        text=True,
        check=False,
    )
    kind = asked.stdout.strip() or "unknown"
    what = "cannot tell from this node whether it is shared"
    if kind in LOCAL_KINDS:
        what = "looks like a local file system"
    return warn("shared", f"{kind}: {what}", "--check-node asks a compute node")


def _promises(folder: Path) -> Iterator[CheckResult]:
    """Rename over a file, fsync, exclusive creation, locks, and the time of files."""
    old, new = folder / "old", folder / "new"
    try:
        old.write_bytes(b"old")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, b"new")
        os.fsync(descriptor)
        os.close(descriptor)
        new.rename(old)
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        renamed = old.read_bytes() == b"new" and not new.exists()
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            renamed = False  # the second one had to fail
        except FileExistsError:
            pass
    except OSError as error:
        hint = "use another file system: checkpoints and shards rely on atomic rename"
        yield fail("rename, fsync", f"{error.strerror}", hint)
        return
    if renamed:
        yield ok("rename, fsync", "rename is atomic; exclusive creation works")
    else:
        yield fail("rename, fsync", "a rename did not replace a file", "use another file system")
    yield _locks(old)
    skew_s = old.stat().st_mtime - time.time()
    off = f"files are {skew_s:+.1f} s off this node's time"
    if abs(skew_s) <= MAX_CLOCK_SKEW_S:
        yield ok("clock", off)
    else:
        hint = "ask the administrators for time synchronisation: ages in status will be wrong"
        yield warn("clock", off, hint)


def _locks(path: Path) -> CheckResult:
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ok("locks", "flock works")
    except OSError as error:
        hint = "mount it with locks (Lustre: -o flock); two launchers in one run are not noticed"
        return warn("locks", f"flock does not work: {error.strerror}", hint)
    finally:
        os.close(first)
        os.close(second)
    message = "flock does not exclude a second process"
    return warn("locks", message, "do not start the same run twice")


def _room(fileroot: Path) -> CheckResult:
    facts = os.statvfs(fileroot)
    free_bytes = facts.f_bavail * facts.f_frsize
    room = f"{free_bytes / (1 << 30):.0f} GiB free"
    if facts.f_files and facts.f_favail < MIN_FREE_INODES:
        return fail("room", f"{room}, but {facts.f_favail} inodes", "remove small files")
    if free_bytes < MIN_FREE_BYTES:
        return fail("room", room, "free some space, or choose another cluster.fileroot")
    if free_bytes < RECOMMENDED_FREE_BYTES:
        hint = "enough for small models; a checkpoint takes 16 bytes per parameter"
        return warn("room", room, hint)
    return ok("room", room)


def _quota() -> Iterator[CheckResult]:
    """What `quota` says, where there is such a command; Lustre's has its own."""
    if shutil.which("quota") is None:
        return
    asked = subprocess.run(
        ["quota", "--quiet", "--hide-device"], capture_output=True, text=True, check=False
    )
    if asked.stdout.strip():
        yield warn("quota", asked.stdout.strip(), "quota -s; remove what is not needed")
    else:
        yield ok("quota", "nothing is over its limit")
