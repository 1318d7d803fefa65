"""Complete reads and vectored writes of files, and the opening of those that are read."""

import errno
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = bytes | memoryview | npt.NDArray[Any]

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
    waiting = array.reshape(-1).view(np.uint8).data
    while waiting:
        taken_bytes = os.preadv(descriptor, [waiting], offset)
        if taken_bytes == 0:
            raise OSError(f"the file is {len(waiting)} bytes too short")
        waiting, offset = waiting[taken_bytes:], offset + taken_bytes
