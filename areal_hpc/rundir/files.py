"""Files of a run directory: its folders, whole and numbered files, complete reads, patience.

A run's folder may be moved while the run works, as people do when a quota fills. Processes that
made it anew would go on in an empty one, and what they seal there nobody reads. To another file
system it is moved file by file: a run is there as long as its recipe is.

Whoever can write in a run directory runs code as the run's owner at its next start, and whoever can
read there has the tasks and their answers. So only the owner writes, and keys are for the owner
alone.
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
"""What new files do not allow."""
MISSING_LOOKS = 3
"""Looks in a row at which a folder is missing until it counts as gone: storage may be late."""
_mark_by_run_dir: dict[Path, Path] = {}


def forbid_making(run_dir: Path) -> None:
    _mark_by_run_dir[run_dir] = find_mark(run_dir)


def find_mark(run_dir: Path) -> Path:
    recipe = run_dir / RECIPE_FILE
    return recipe if recipe.exists() else run_dir


def make_folder(folder: Path) -> None:
    """Make a folder, and those that lead to it, unless it is there.

    Raises:
        OSError: The storage refused, or the run's own folder is gone.
    """
    for run_dir, mark in _mark_by_run_dir.items():
        if folder.is_relative_to(run_dir) and not mark.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run_dir))
    folder.mkdir(parents=True, exist_ok=True)


class RunDirWatch:
    """Watches for the end of a run's folder, from time to time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._mark = find_mark(run_dir)
        self._missing = 0

    @property
    def is_missing(self) -> bool:
        """It was missing at the last look."""
        return self._missing > 0

    def is_gone(self, looks: int = MISSING_LOOKS) -> bool:
        """True once it was missing at so many looks in a row, this one included."""
        if self._mark.exists():
            self._missing = 0
            return False
        self._run_dir.parent.stat()  # raises while the storage is away
        self._missing += 1
        return self._missing >= looks


@contextmanager
def restrict_new_files(readable_by: Readers) -> Iterator[None]:
    """New files are for these readers alone, also those of processes started in the context."""
    before = os.umask(UMASKS[readable_by])
    try:
        yield
    finally:
        os.umask(before)


def secure_run_dir(root: Path, readable_by: Readers) -> None:
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


def claim_next_number(directory: Path) -> int:
    """Create the next numbered file (O_EXCL) and return its number, counted from 1.

    Two trainers that start at once get two numbers; the lower one is thereby fenced.
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
    """The highest number taken so far; 0 before the first."""
    if not directory.is_dir():
        return 0
    return max(
        (int(entry.name) for entry in directory.iterdir() if entry.name.isdigit()), default=0
    )


def get_number_path(directory: Path, start_number: int, suffix: str = "") -> Path:
    return directory / f"{start_number:04d}{suffix}"


def build_generation_check(directory: Path, generation: int) -> Callable[[], None]:
    """A check, to be made before anything becomes visible to others.

    It raises SupersededTrainerError when a later generation than `generation` has begun.
    """

    def check() -> None:
        newest = read_newest_number(directory)
        if newest > generation:
            raise SupersededTrainerError(
                f"generation {newest} took over from generation {generation}"
            )

    return check


_MAX_BUFFERS_PER_CALL = 1024
"""IOV_MAX of Linux: buffers one system call may take."""
_FILE_KIND_BY_TYPE = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def open_regular_file(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file from; whatever else lies in its place is refused.

    A FIFO would hold its reader up for ever; a symbolic link or a device leads out of the run.
    """
    # Without O_NONBLOCK, opening a FIFO waits for somebody who writes to it.
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
    """Write contiguous buffers one after another, at `offset` or where the file stands.

    Returns their bytes. The kernel may take less than it is given (Linux takes at most 2 GiB at a
    time, a full disk what still fits): the rest is then offered again.

    Raises:
        OSError: The storage refused; some bytes may have been written.
    """
    # Arrays are buffers, but typing has no word for that before Python 3.12.
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
    """Fill a contiguous array with the bytes at `offset`; OSError if the file ends before."""
    waiting = array.reshape(-1).view("u1").data
    while waiting:
        taken_bytes = os.preadv(descriptor, [waiting], offset)
        if taken_bytes == 0:
            raise OSError(f"the file is {len(waiting)} bytes too short")
        waiting, offset = waiting[taken_bytes:], offset + taken_bytes


STORAGE_ERROR_LIMIT_S = 60.0
"""Errors may come for so long, and nothing else, until the storage counts as lost."""


@contextmanager
def log_storage_errors(
    files: str = "shared storage", level: int = logging.WARNING
) -> Iterator[None]:
    """Leave the block at an OSError, which is logged: an error where nobody tries again."""
    try:
        yield
    except OSError as error:
        log.log(level, "%s could not be read or written: %s", files, error)


class StorageErrorTolerance:
    """Passes over errors of the storage unless they go on for too long."""

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
        """Leave the block at an OSError, and go on behind it.

        Raises:
            ClusterError: Every block for `limit_s` has met one.
            BrokenPipeError: The block's own: nobody reads what it prints.
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
