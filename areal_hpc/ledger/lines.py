"""Files of JSON lines that only grow, and survive a crash in the midst of a line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_hpc.durable import sync_path

Line = TypeVar("Line")


def append_line(path: Path, line: msgspec.Struct) -> None:
    """Make a line durable.

    Raises:
        OSError: The file system refused.
    """
    is_new = not path.exists()
    with path.open("ab+") as stream:
        # A crash may have left half a line: end it, or it would swallow this one.
        is_torn = stream.tell() > 0 and os.pread(stream.fileno(), 1, stream.tell() - 1) != b"\n"
        stream.write(b"\n" * is_torn + msgspec.json.encode(line) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    if is_new:
        sync_path(path.parent)


def read_lines(path: Path, kind: type[Line]) -> Iterator[Line]:
    """Every whole line in order. Half a line was never acknowledged."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=kind)
