"""A process's file of spans, of which only what lies within a stretch of time is read."""

import contextlib
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from areal_hpc.rundir.jsonl import decode_readable_records
from areal_hpc.rundir.telemetry.spans import Span, SpanLine, get_older_path

MAX_CLOCK_ERROR_S = 600.0
"""Lines are looked for so far outside of the stretch: their times are not corrected yet."""
_DECODER = msgspec.json.Decoder(SpanLine)
_START_MARK = b'{"type":"process"'
_WHOLE_READ_BYTES = 1 << 16
"""Parts of a file below this are not searched further."""


def read_span_lines(newest_file: Path, from_time: float, to_time: float) -> list[SpanLine]:
    """Lines of a process's two files that may matter between two Unix times, oldest first.

    Those that say which process wrote what follows, and how clocks differed, are among them.
    """
    lines: list[SpanLine] = []
    with contextlib.ExitStack() as stack:
        for stream in _open_files(newest_file, stack):
            if not os.fstat(stream.fileno()).st_size:  # which cannot be mapped
                continue
            with mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as content:
                lines += _select_lines_since(content, stream.name, from_time - MAX_CLOCK_ERROR_S)
    last = to_time + MAX_CLOCK_ERROR_S
    return [one for one in lines if not isinstance(one, Span) or one.begin <= last]


def _open_files(newest_file: Path, stack: contextlib.ExitStack) -> list[BinaryIO]:
    """Open those of the two files that exist, oldest first.

    The newest is opened first: if it becomes the older one meanwhile, both names lead to it.
    """
    opened: list[BinaryIO] = []
    for path in (newest_file, get_older_path(newest_file)):
        with contextlib.suppress(FileNotFoundError):
            stream = stack.enter_context(path.open("rb"))
            if not any(os.path.sameopenfile(stream.fileno(), one.fileno()) for one in opened):
                opened.insert(0, stream)
    return opened


def _select_lines_since(content: mmap.mmap, file_name: str, since: float) -> Iterator[SpanLine]:
    position = _find_first_since(content, since)
    start = content.rfind(_START_MARK, 0, position)
    if start >= 0:
        yield from _decode_readable_lines(
            content[start : content.find(b"\n", start) + 1], file_name
        )
    yield from _decode_readable_lines(content[position:], file_name)


def _decode_readable_lines(content: bytes, file_name: str) -> list[SpanLine]:
    with contextlib.suppress(msgspec.DecodeError):
        return _DECODER.decode_lines(content)
    return decode_readable_records(content, SpanLine, file_name)  # type: ignore[arg-type]  # a union is no type


def _find_first_since(content: mmap.mmap, since: float) -> int:
    low, high = 0, len(content)
    while math.isfinite(since) and high - low > _WHOLE_READ_BYTES:
        middle = content.find(b"\n", (low + high) // 2, high) + 1
        if middle == 0 or middle >= high:
            break
        line = content[middle : content.find(b"\n", middle) + 1]
        if _get_time(line) < since:
            low = middle
        else:
            high = middle
    return low


def _get_time(line: bytes) -> float:
    try:
        found = _DECODER.decode(line)
    except msgspec.DecodeError:
        return -math.inf
    return found.end if isinstance(found, Span) else found.at
