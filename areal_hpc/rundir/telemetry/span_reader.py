"""Reader of `spans/`: every process's spans, in the time of the ledger's node."""

import bisect
import contextlib
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from areal_hpc.rundir.jsonl import decode_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import LEDGER_SERVICE
from areal_hpc.rundir.telemetry.spans import (
    BegunSpan,
    ClockSample,
    LostSpans,
    ProcessStart,
    Span,
    SpanLine,
    get_older_path,
)

MAX_MERGED_GAP_S = 0.005
"""Pieces of a state so close to one another are one span."""
_PROCESS_NAME_PATTERN = re.compile(r"(?P<job>.+?)-(?P<process>[a-z_]+)(-\d+)?")
UNDER_WAY = "under way"
"""The fact `status` of what had begun and was not over when its process was last heard of."""
CLOCK_SAMPLE_WINDOW_S = 300.0
"""Of the clock samples so near to a time the one with the least error is taken."""

MAX_CLOCK_ERROR_S = 600.0
"""Lines are looked for so far outside of the stretch: their times are not corrected yet."""
_LINE_DECODER = msgspec.json.Decoder(SpanLine)
_START_MARK = b'{"type":"process"'
_WHOLE_READ_BYTES = 1 << 16
"""Parts of a file below this are not searched further."""


@dataclass(frozen=True, slots=True)
class ProcessSpans:
    """One start of one process: its spans, by their begin."""

    name: str
    """`<job>-<process>`, as its file is called."""
    node: str
    pid: int
    begin: float
    spans: Sequence[Span]
    lost: int = 0
    offset_s: float | None = 0.0
    """What was added to its times, lately; None: its clock was never compared."""

    @property
    def end(self) -> float:
        return max((one.end for one in self.spans), default=self.begin)

    @property
    def lanes(self) -> list[str]:
        return sorted({one.lane for one in self.spans})


@dataclass(slots=True)
class _ProcessLines:
    name: str
    start: ProcessStart
    spans: list[Span] = field(default_factory=list)
    begun: list[BegunSpan] = field(default_factory=list)
    samples: list[ClockSample] = field(default_factory=list)
    lost: int = 0


def read_spans(
    paths: RunPaths, from_time: float = -math.inf, to_time: float = math.inf
) -> list[ProcessSpans]:
    """The processes with spans between two Unix times of the ledger's node, by name and begin."""
    pieces = [
        one
        for name in sorted({path.name.split(".")[0] for path in paths.spans_dir.glob("*.jsonl")})
        for one in _read_process_starts(paths, name, from_time, to_time)
    ]
    by_node = _collect_samples_of_nodes(pieces)
    found = []
    for piece in pieces:
        clock = NodeClock(piece.samples or by_node.get(piece.start.node, []))
        process = _convert_to_ledger_time(piece, clock, is_known=piece.start.node in by_node)
        spans = [one for one in process.spans if one.end >= from_time and one.begin <= to_time]
        if spans:
            found.append(replace(process, spans=spans))
    return sorted(found, key=lambda one: (one.name, one.begin))


def split_process_name(process_name: str) -> tuple[str, str]:
    match = _PROCESS_NAME_PATTERN.fullmatch(process_name)
    return (match["job"], match["process"]) if match else ("", process_name)


def _read_process_starts(
    paths: RunPaths, process_name: str, from_time: float, to_time: float
) -> Iterator[_ProcessLines]:
    piece: _ProcessLines | None = None
    for line in read_span_lines(paths.spans(process_name), from_time, to_time):
        if isinstance(line, ProcessStart):
            if piece is not None:
                old = piece.start
                if (old.node, old.pid, old.began_at) == (line.node, line.pid, line.began_at):
                    continue
                yield piece
            piece = _ProcessLines(process_name, line)
            continue
        if piece is None:
            at = line.begin if isinstance(line, Span) else line.at
            piece = _ProcessLines(process_name, ProcessStart(at, "", 0))
        match line:
            case Span():
                piece.spans.append(line)
            case BegunSpan():
                piece.begun.append(line)
            case ClockSample():
                piece.samples.append(line)
            case LostSpans(count=count):
                piece.lost += count
    if piece is not None:
        yield piece


def _collect_samples_of_nodes(pieces: Iterable[_ProcessLines]) -> dict[str, list[ClockSample]]:
    """Clock samples by node; none are needed of the ledger's own."""
    found: dict[str, list[ClockSample]] = {}
    for piece in pieces:
        is_ledger = split_process_name(piece.name)[1] == LEDGER_SERVICE
        if piece.samples or is_ledger:
            found.setdefault(piece.start.node, []).extend(piece.samples)
    return found


class NodeClock:
    """What a node's clock lacks to be that of the ledger's node, from samples of it. Pure."""

    def __init__(self, samples: Sequence[ClockSample]) -> None:
        self._samples = sorted(samples, key=lambda one: one.at)
        self._times = [one.at for one in self._samples]

    def get_offset_s(self, unix_time: float) -> float:
        """By the best sample near that time, else by the nearest one; 0 without any."""
        if not self._samples:
            return 0.0
        first = bisect.bisect_left(self._times, unix_time - CLOCK_SAMPLE_WINDOW_S)
        last = bisect.bisect_right(self._times, unix_time + CLOCK_SAMPLE_WINDOW_S)
        near = self._samples[first:last]
        if near:
            return min(near, key=lambda one: one.error_s).offset_s
        nearest = self._samples[max(0, first - 1) : first + 1]
        return min(nearest, key=lambda one: abs(one.at - unix_time)).offset_s


def _convert_to_ledger_time(
    piece: _ProcessLines, clock: NodeClock, *, is_known: bool
) -> ProcessSpans:
    spans: list[Span] = []
    open_states: dict[str, int] = {}
    under_way = list(_list_unended(piece))
    for one in sorted([*piece.spans, *under_way], key=lambda one: one.begin):
        offset_s = clock.get_offset_s(one.begin)
        span = msgspec.structs.replace(one, begin=one.begin + offset_s, end=one.end + offset_s)
        place = open_states.get(one.lane)
        last = None if place is None else spans[place]
        if (
            last is not None
            and last.name == span.name
            and not (last.facts or span.facts)
            and abs(span.begin - last.end) <= MAX_MERGED_GAP_S
        ):
            spans[open_states[one.lane]] = msgspec.structs.replace(last, end=span.end)
        else:
            open_states[one.lane] = len(spans)
            spans.append(span)
    first_s = clock.get_offset_s(piece.start.at)
    last_s = clock.get_offset_s(piece.spans[-1].end) if piece.spans else first_s
    return ProcessSpans(
        piece.name,
        piece.start.node,
        piece.start.pid,
        piece.start.at + first_s,
        spans,
        piece.lost,
        last_s if is_known else None,
    )


def _list_unended(piece: _ProcessLines) -> Iterator[Span]:
    ended: dict[tuple[str, str, float], list[Span]] = {}
    for one in piece.spans if piece.begun else ():
        ended.setdefault((one.name, one.lane, one.begin), []).append(one)
    last = max((one.end for one in piece.spans), default=0.0)
    for begun in piece.begun:
        same = ended.get((begun.name, begun.lane, begun.begin), [])
        if not any(begun.facts.items() <= one.facts.items() for one in same):
            facts = begun.facts | {"status": UNDER_WAY}
            yield Span(begun.name, begun.begin, max(begun.at, last), begun.lane, facts)


# Lines of a file ----------------------------------------------------------------------------------


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
        return _LINE_DECODER.decode_lines(content)
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
        found = _LINE_DECODER.decode(line)
    except msgspec.DecodeError:
        return -math.inf
    return found.end if isinstance(found, Span) else found.at
