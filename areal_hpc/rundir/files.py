"""Files of a run directory: atomic and numbered files, complete reads, tolerance of storage errors.

People move a run's folder while the run works, for example when a quota is full. A process that
made the folder anew would write shards where nobody reads them, so folders below a run directory
are made only while the run's recipe exists. (A move to another file system goes file by file.)

A user who can write in a run directory can run code as the run's owner at its next start. A user
who can read there sees the tasks and their answers. So only the owner writes, and only the owner
reads keys.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from areal_hpc.errors import ClusterError, RecipeError, SupersededTrainerError
from areal_hpc.rundir.paths import RECIPE_FILE

if TYPE_CHECKING:  # light processes run without numpy
    import numpy.typing as npt

    Buffer = bytes | memoryview | npt.NDArray[Any]

log = logging.getLogger(__name__)

Readers = Literal["owner", "group"]
UMASKS: dict[Readers, int] = {"owner": 0o077, "group": 0o027}
"""Permission bits removed from new files."""
MISSING_LOOKS = 3
"""Consecutive looks that must miss a folder before it counts as gone: storage may lag behind."""
_mark_by_run_dir: dict[Path, Path] = {}


def forbid_making(run_dir: Path) -> None:
    _mark_by_run_dir[run_dir] = find_mark(run_dir)


def find_mark(run_dir: Path) -> Path:
    recipe = run_dir / RECIPE_FILE
    return recipe if recipe.exists() else run_dir


def make_folder(folder: Path) -> None:
    """Make a folder and its parents unless they exist.

    Raises:
        OSError: The storage refused, or the run's own folder is gone.
    """
    for run_dir, mark in _mark_by_run_dir.items():
        if folder.is_relative_to(run_dir) and not mark.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run_dir))
    folder.mkdir(parents=True, exist_ok=True)


class RunDirWatch:
    """Detector of a run directory that was moved or removed while its processes work."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._mark = find_mark(run_dir)
        self._missing = 0

    @property
    def is_missing(self) -> bool:
        """Whether the folder was missing at the last look."""
        return self._missing > 0

    def is_gone(self, looks: int = MISSING_LOOKS) -> bool:
        """Look once more; return whether that many consecutive looks missed the folder."""
        if self._mark.exists():
            self._missing = 0
            return False
        self._run_dir.parent.stat()  # raises while the storage is away
        self._missing += 1
        return self._missing >= looks


@contextmanager
def restrict_new_files(readable_by: Readers) -> Iterator[None]:
    """Restrict new files to these readers, also those of processes started in the context."""
    before = os.umask(UMASKS[readable_by])
    try:
        yield
    finally:
        os.umask(before)


def secure_run_dir(root: Path, readable_by: Readers) -> None:
    """Make a run directory that only its owner can write to, or restrict an existing one so.

    Raises:
        RecipeError: It belongs to another user, or its storage ignores file modes.
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
        mode = stat.S_IMODE(root.stat().st_mode) & 0o777
        if mode != wanted:
            problem = f"the run directory has mode {mode:04o}, expected {wanted:04o}"
            raise RecipeError(f"{problem}: its storage keeps no modes", key=str(root), hint=hint)


def fsync_path(path: Path) -> None:
    """Force a file to disk, or the entries of a directory: new files and renames."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        fsync_path(path)


def write_atomic(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file that readers see whole or not at all, even after a crash.

    Makes missing parent folders.
    """
    write_temporary(path, content, mode=mode).rename(path)
    fsync_path(path.parent)


def write_once(path: Path, content: bytes) -> bool:
    """Write a file as `write_atomic` does unless it exists; return whether it was written."""
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
    """Open a hidden file next to `path`; it is durable at the end, and an error removes it."""
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


def claim_next_number(directory: Path) -> int:
    """Create the next numbered file (O_EXCL) and return its number, counted from 1.

    Two trainers that start at once get two numbers, and the lower number is fenced.
    """
    make_folder(directory)
    number = read_newest_number(directory) + 1
    while True:
        try:
            descriptor = os.open(
                get_number_path(directory, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644
            )
        except FileExistsError:
            number += 1
            continue
        os.close(descriptor)
        return number


def read_newest_number(directory: Path) -> int:
    """Return the highest number claimed so far; 0 before the first."""
    if not directory.is_dir():
        return 0
    return max(
        (int(entry.name) for entry in directory.iterdir() if entry.name.isdigit()), default=0
    )


def get_number_path(directory: Path, start_number: int, suffix: str = "") -> Path:
    return directory / f"{start_number:04d}{suffix}"


def build_generation_check(directory: Path, generation: int) -> Callable[[], None]:
    """Build a check to call before anything becomes visible to other processes.

    The check raises SupersededTrainerError if a later generation than `generation` has begun.
    """

    def check() -> None:
        newest = read_newest_number(directory)
        if newest > generation:
            raise SupersededTrainerError(
                f"generation {newest} took over from generation {generation}"
            )

    return check


_MAX_BUFFERS_PER_CALL = 1024
"""IOV_MAX of Linux: buffers per system call."""
_FILE_KIND_BY_TYPE = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def open_regular_file(path: Path) -> Iterator[int]:
    """Open a regular file for reading; refuse anything else at its path.

    A FIFO would block its reader for ever; a symbolic link or a device leads out of the run.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _build_file_kind_error(path, "a symbolic link") from error
        raise
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise _build_file_kind_error(path, _FILE_KIND_BY_TYPE.get(kind, "something else"))
        yield descriptor
    finally:
        os.close(descriptor)


def _build_file_kind_error(path: Path, kind: str) -> OSError:
    return OSError(errno.EINVAL, f"expected a regular file, got {kind}", str(path))


def write_all(descriptor: int, buffers: Iterable[Buffer], offset: int | None = None) -> int:
    """Write contiguous buffers one after another, at `offset` or at the file's position.

    Returns the number of bytes. The kernel may write fewer bytes than it is given (at most 2 GiB
    per call, less on a full disk); the rest is then written by further calls.

    Raises:
        OSError: The storage refused; some bytes may have been written.
    """
    # Arrays are buffers, but typing cannot express that before Python 3.12.
    views = [memoryview(buffer) for buffer in buffers]  # type: ignore[arg-type]
    waiting = deque([view.cast("B") for view in views if view.nbytes])
    total_bytes = 0
    while waiting:
        batch = list(islice(waiting, _MAX_BUFFERS_PER_CALL))
        if offset is None:
            taken_bytes = os.writev(descriptor, batch)
        else:
            taken_bytes = os.pwritev(descriptor, batch, offset + total_bytes)
        if taken_bytes == 0:
            raise OSError(errno.ENOSPC, "write failed: the storage is full")
        total_bytes += taken_bytes
        while taken_bytes:
            first = waiting.popleft()
            if len(first) > taken_bytes:
                waiting.appendleft(first[taken_bytes:])
            taken_bytes -= min(len(first), taken_bytes)
    return total_bytes


def read_exact(descriptor: int, array: npt.NDArray[Any], offset: int) -> None:
    """Fill a contiguous array with the bytes at `offset`; OSError if the file is too short."""
    waiting = array.reshape(-1).view("u1").data
    while waiting:
        taken_bytes = os.preadv(descriptor, [waiting], offset)
        if taken_bytes == 0:
            raise OSError(f"the file is {len(waiting)} bytes too short")
        waiting, offset = waiting[taken_bytes:], offset + taken_bytes


STORAGE_ERROR_LIMIT_S = 60.0
"""Duration of uninterrupted errors after which the storage counts as lost."""


@contextmanager
def log_storage_errors(
    files: str = "shared storage", level: int = logging.WARNING
) -> Iterator[None]:
    """Log an OSError of the block and go on behind it, where nothing is retried."""
    try:
        yield
    except OSError as error:
        log.log(level, "%s could not be read or written: %s", files, error)


class StorageErrorTolerance:
    """Tolerance of storage errors that end within a limit."""

    def __init__(
        self,
        limit_s: float = STORAGE_ERROR_LIMIT_S,
        *,
        read_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._read_s = read_s
        self._failing_since_s: float | None = None

    @contextmanager
    def tolerate(self) -> Iterator[None]:
        """Go on behind the block if it raises an OSError.

        Raises:
            ClusterError: Every block for `limit_s` has raised one.
            BrokenPipeError: The block raised it: nobody reads its output.
        """
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            now_s = self._read_s()
            if self._failing_since_s is None:
                self._failing_since_s = now_s
                log.warning("shared storage does not respond, trying again: %s", error)
            if now_s - self._failing_since_s > self._limit_s:
                raise ClusterError(
                    f"shared storage has answered with errors for {self._limit_s:.0f} s: {error}",
                    key=str(error.filename or ""),
                    hint="look whether the run directory can be read and written, then resume",
                ) from error
        else:
            self._failing_since_s = None
