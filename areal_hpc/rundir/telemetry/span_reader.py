"""Reader of `spans/`: every process's spans, in the time of its node's own clock."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from areal_hpc.rundir.jsonl import decode_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.spans import (
    BegunSpan,
    LostSpans,
    ProcessStart,
    Span,
    SpanLine,
    get_older_path,
)

MAX_MERGED_GAP_S = 0.005
"""Gap up to which pieces of a state are merged into one span."""
_PROCESS_NAME_PATTERN = re.compile(r"(?P<job>.+?)-(?P<process>[a-z_]+)(-\d+)?")
MAX_DISORDER_S = 60.0
"""Longest disorder of lines, as a process may report a time when it is over."""
UNDER_WAY = "under way"
"""Value of the fact `status` of a span that had not ended at its process's last line."""
_LINE_DECODER = msgspec.json.Decoder(SpanLine)
_START_MARK = b'{"type":"process"'
_WHOLE_READ_BYTES = 1 << 16
"""Size below which a part of a file is read whole instead of searched."""


@dataclass(frozen=True, slots=True)
class ProcessSpans:
    """Spans of one start of a process, ordered by begin."""

    name: str
    """`<job>-<process>`, the name of its file."""
    node: str
    pid: int
    begin: float
    spans: Sequence[Span]
    lost: int = 0

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=self.begin)

    @property
    def lanes(self) -> list[str]:
        return sorted({span.lane for span in self.spans})


@dataclass(slots=True)
class _ProcessLines:
    name: str
    start: ProcessStart
    spans: list[Span] = field(default_factory=list)
    begun: list[BegunSpan] = field(default_factory=list)
    lost: int = 0


def read_spans(
    paths: RunPaths, from_time: float = -math.inf, to_time: float = math.inf
) -> list[ProcessSpans]:
    """Read the processes that have spans between two Unix times, by name and begin."""
    processes: list[ProcessSpans] = []
    for name in sorted({path.name.split(".")[0] for path in paths.spans_dir.glob("*.jsonl")}):
        for piece in _read_process_starts(paths, name, from_time, to_time):
            node, pid, begin = piece.start.node, piece.start.pid, piece.start.at
            spans = _merge_spans(piece)
            processes.append(ProcessSpans(name, node, pid, begin, spans, piece.lost))
    processes.sort(key=lambda process: (process.name, process.begin))
    return select_spans(processes, from_time, to_time)


def select_spans(
    processes: Iterable[ProcessSpans], from_time: float, to_time: float
) -> list[ProcessSpans]:
    """Select the spans between two Unix times, and the processes that have some."""
    chosen = []
    for process in processes:
        spans = [span for span in process.spans if span.end >= from_time and span.begin <= to_time]
        if spans:
            chosen.append(replace(process, spans=spans))
    return chosen


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
            case LostSpans(count=count):
                piece.lost += count
    if piece is not None:
        yield piece


def _merge_spans(piece: _ProcessLines) -> list[Span]:
    spans: list[Span] = []
    open_states: dict[str, int] = {}
    for span in sorted([*piece.spans, *_list_unended(piece)], key=lambda span: span.begin):
        index = open_states.get(span.lane)
        last = None if index is None else spans[index]
        if (
            last is not None
            and last.name == span.name
            and not (last.facts or span.facts)
            and abs(span.begin - last.end) <= MAX_MERGED_GAP_S
        ):
            spans[open_states[span.lane]] = msgspec.structs.replace(last, end=span.end)
        else:
            open_states[span.lane] = len(spans)
            spans.append(span)
    return spans


def _list_unended(piece: _ProcessLines) -> Iterator[Span]:
    ended: dict[tuple[str, str, float], list[Span]] = {}
    for span in piece.spans if piece.begun else ():
        ended.setdefault((span.name, span.lane, span.begin), []).append(span)
    last = max((span.end for span in piece.spans), default=0.0)
    for begun in piece.begun:
        same = ended.get((begun.name, begun.lane, begun.begin), [])
        if not any(begun.facts.items() <= span.facts.items() for span in same):
            facts = begun.facts | {"status": UNDER_WAY}
            yield Span(begun.name, begun.begin, max(begun.at, last), begun.lane, facts)


# Lines of a file ----------------------------------------------------------------------------------


def read_span_lines(newest_file: Path, from_time: float, to_time: float) -> list[SpanLine]:
    """Read the lines of a process's two files that may matter between two Unix times, oldest first.

    The lines of process starts that precede them are included.
    """
    lines: list[SpanLine] = []
    for content in _read_files(newest_file):
        lines += _select_lines_since(content, newest_file.name, from_time - MAX_DISORDER_S)
    return [line for line in lines if not isinstance(line, Span) or line.begin <= to_time]


def _read_files(newest_file: Path) -> list[bytes]:
    """Read those of the two files that exist, oldest first.

    The newest file is read first. If it is rotated meanwhile, the older file begins with the same
    content, which is then returned once.
    """
    contents: list[bytes] = []
    for path in (newest_file, get_older_path(newest_file)):
        with contextlib.suppress(FileNotFoundError):
            contents.insert(0, path.read_bytes())
    if len(contents) == 2 and contents[1] and contents[0].startswith(contents[1]):
        return contents[:1]
    return contents


def _select_lines_since(content: bytes, file_name: str, since: float) -> Iterator[SpanLine]:
    position = _find_first_since(content, since)
    start = content.rfind(_START_MARK, 0, position)
    if start >= 0:
        first_line = content[start : content.find(b"\n", start) + 1]
        yield from _decode_readable_lines(first_line, file_name)
    yield from _decode_readable_lines(content[position:], file_name)


def _decode_readable_lines(content: bytes, file_name: str) -> list[SpanLine]:
    with contextlib.suppress(msgspec.DecodeError):
        return _LINE_DECODER.decode_lines(content)
    return decode_readable_records(content, SpanLine, file_name)  # type: ignore[arg-type]  # a union is no type


def _find_first_since(content: bytes, since: float) -> int:
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
        decoded = _LINE_DECODER.decode(line)
    except msgspec.DecodeError:
        return -math.inf
    return decoded.end if isinstance(decoded, Span) else decoded.at
