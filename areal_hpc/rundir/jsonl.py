"""JSON-lines files: one append that repairs a torn end, one reader that skips a torn line.

A crash or a full disk leaves a fragment without a newline at the end of a file. The next append
first ends that line, so that only one line is lost; readers skip the fragment.
"""

import contextlib
import errno
import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from areal_hpc.rundir.files import fsync_path, write_atomic
from areal_hpc.wire.decoding import decode_json

RecordT = TypeVar("RecordT")

JsonRow = Mapping[str, Any]
"""A decoded line of the metrics or events."""
JsonMetricRow = dict[str, int | float | str | None]
"""The metrics of one step by name; None stands for a number that is not finite."""

log = logging.getLogger(__name__)


def append_line(path: Path, record: object, *, sync: bool = False) -> None:
    """Append one record in a single write, so that lines of several writers never mix.

    Creates a missing file, but not its folder. Infinities and NaN become null, and half of a
    surrogate pair becomes a question mark. `sync` forces the line and a new file's name to disk.
    """
    append_lines(path, [record], sync=sync)


def append_lines(path: Path, records: Iterable[object], *, sync: bool = False) -> None:
    """Append records in a single write, like `append_line`."""
    lines = b"".join(_encode_record(record) + b"\n" for record in records)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size_bytes = os.fstat(descriptor).st_size
        is_torn = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
        content = b"\n" * is_torn + lines
        if (taken_bytes := os.write(descriptor, content)) != len(content):
            raise OSError(errno.ENOSPC, f"{path} took {taken_bytes} of {len(content)} bytes")
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if sync and size_bytes == 0:
        fsync_path(path.parent)


def replace_lines(path: Path, records: Iterable[object]) -> None:
    """Replace a file by one with these records, whole or not at all."""
    write_atomic(path, b"".join(_encode_record(record) + b"\n" for record in records))


def _encode_record(record: object) -> bytes:
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        # Half of a surrogate pair, from an emoji that a model cut in two, has no UTF-8 form.
        text = json.dumps(msgspec.to_builtins(record), ensure_ascii=False)
        return msgspec.json.encode(json.loads(text.encode(errors="replace")))


@overload
def read_readable_records(path: Path) -> list[dict[str, Any]]: ...
@overload
def read_readable_records(path: Path, record_type: type[RecordT]) -> list[RecordT]: ...
def read_readable_records(path: Path, record_type: Any = dict[str, Any]) -> list[Any]:
    """Read every record of a file in order; none if there is no file.

    A line that is no `record_type` is skipped with a warning that names it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return decode_readable_records(content, record_type, str(path))


class LineFollower:
    """Reader of the lines that are appended to a file; each line is read once.

    Each look opens the file, because NFS revalidates at an open and not at a `stat`. A file that
    was replaced is read from its beginning.
    """

    def __init__(self, path: Path, *, from_end: bool = False, max_bytes: int = -1) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._inode = 0
        self.offset = 0
        """Position of the first byte that was not read yet."""
        if from_end:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                self._inode, self.offset = status.st_ino, status.st_size

    def read_new_lines(self) -> bytes:
        """Return whole lines of at most `max_bytes` in all, or a part of one that is longer.

        Raises:
            OSError: The file is missing or cannot be read.
        """
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self._path, flags)
        except FileNotFoundError:
            self.offset = 0
            raise
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if self._inode not in (0, status.st_ino) or status.st_size < self.offset:
                self.offset = 0
            self._inode = status.st_ino
            stream.seek(self.offset)
            content = stream.read(self._max_bytes)
        whole_bytes = content.rfind(b"\n") + 1
        if not whole_bytes and len(content) == self._max_bytes:
            whole_bytes = len(content)
        self.offset += whole_bytes
        return content[:whole_bytes]


def read_tail_lines(path: Path, max_bytes: int) -> bytes:
    """Read the end of a file, from the beginning of a line."""
    with path.open("rb") as stream:
        whole_bytes = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, whole_bytes - max_bytes))
        content = stream.read(max_bytes)
    return content if whole_bytes <= max_bytes else content.partition(b"\n")[2]


def decode_readable_records(
    content: bytes, record_type: type[RecordT], file_name: str = ""
) -> list[RecordT]:
    """Decode the records in a piece of a file whose last line may lack its newline.

    `file_name` names the file in the warning about a line that is no `record_type`. Without it
    such lines are skipped in silence, for a piece that may begin within a line.
    """
    records = []
    *lines, last = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                records.append(decode_json(line, record_type))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if file_name:
                _warn_of_unreadable_line(file_name, number, str(error), line[:80])
    # Empty, still being written, or cut short by a crash: no writer has reported it as written.
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        records.append(decode_json(last, record_type))
    return records


@functools.lru_cache(maxsize=1024)
def _warn_of_unreadable_line(file_name: str, line_number: int, reason: str, start: bytes) -> None:
    log.warning(
        "%s line %d cannot be read and is left out (%s): %r", file_name, line_number, reason, start
    )
