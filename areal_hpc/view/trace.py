"""Timeline of steps in the trace format of Chrome, which Perfetto opens: `areal-hpc trace`.

A process of the trace is the trainer, a cell's replicas, a cell's episodes, or the events; calls
and episodes that overlap lie in lanes, which are its threads.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.errors import RecipeError, ShardError
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.atomic import write_atomic_private
from areal_hpc.rundir.events import read_all_events
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import SealedShard, read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.trainer.batch.episode_metrics import merge_spans
from areal_hpc.view.batch_episodes import BatchEpisode, read_batch_episodes
from areal_hpc.view.metric_values import get_number
from areal_hpc.wire.row_record import CallRecord, RowRecord

PHASE_ORDER = (
    *("batch_wait", "read", "measure", "pack", "train"),
    *("cell_wait", "publish", "checkpoint", "eval", "export"),
)
"""Phases of a step in the order in which the trainer comes to them."""
TRAINER_PID, EVENTS_PID, FIRST_CELL_PID = 1, 2, 10
CLOCK_NOTE = (
    "Times are those of each node's own clock. Of a step's phases only lengths are recorded: they "
    "are placed one after another."
)

Row = Mapping[str, Any]
TraceEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time with a name, in Unix seconds."""

    name: str
    begin: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedEpisode:
    """An episode's slice, with its calls."""

    cell: str
    slice: Slice
    calls: tuple[CallRecord, ...]


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What was written."""

    steps: int
    episodes: int
    calls: int
    problems: tuple[str, ...]


def write_trace(paths: RunPaths, first: int, last: int, out: Path) -> TraceReport:
    """Write the timeline of these steps to a new file, readable by its owner alone.

    Raises:
        RecipeError: The file exists, or none of the steps has recorded times.
    """
    if out.exists():
        raise RecipeError(f"{out} exists", key="--out", hint="name another file, or remove it")
    rows = [
        row
        for row in read_metrics(paths.metrics)
        if first <= row["step"] <= last
        and get_number(row, "unix_time_s")
        and get_number(row, "time/step_s")
    ]
    if not rows:
        raise RecipeError(
            f"no step from {first} to {last} has recorded times",
            key="--steps",
            hint="areal-hpc status RUN shows which steps were trained",
        )
    problems: list[str] = []
    begin = min(row["unix_time_s"] - row["time/step_s"] for row in rows)
    end = max(row["unix_time_s"] for row in rows)
    trained = read_batch_episodes(paths, [row["step"] for row in rows if row["step"] > 0], problems)
    episodes = [_trace_trained(one) for one in trained if one.is_timed]
    episodes += read_untrained_episodes(paths, begin, end, problems)
    events = [one for one in read_all_events(paths.events) if begin < one["time"] <= end]
    content = build_trace(rows, episodes, events)
    write_atomic_private(out, msgspec.json.encode(content))
    calls = sum(len(one.calls) for one in episodes)
    return TraceReport(len(rows), len(episodes), calls, tuple(problems))


def _trace_trained(one: BatchEpisode) -> TracedEpisode:
    facts = {"step": one.step, "reward": one.reward, "task": one.task, "row": one.name}
    name = f"ticket {one.ticket_id} episode {one.episode}"
    span = Slice(name, one.record.started_at, one.record.ended_at, facts)
    return TracedEpisode(one.record.cell, span, tuple(one.timed_calls))


def read_untrained_episodes(
    paths: RunPaths, begin: float, end: float, problems: list[str]
) -> Iterator[TracedEpisode]:
    """Held-out and failed episodes that were under way between two Unix times."""
    for sealed in read_index(paths.index_dir):
        if not sealed.untrained:
            continue
        try:
            reader = ShardReader(paths.shards_dir / sealed.file)
            for kind, rows in _list_untrained_rows(sealed):
                records = reader.read_records(rows)
                if records[0].started_at <= end and begin <= records[0].ended_at:
                    yield _trace_untrained(kind, f"{sealed.file}/{rows[0]}", records)
        except (ShardError, IndexError) as error:
            problems.append(f"{sealed.file}: {error}")


def _list_untrained_rows(sealed: SealedShard) -> Iterator[tuple[str, list[int]]]:
    return ((one.kind, one.rows) for one in sealed.untrained if one.rows)


def _trace_untrained(kind: str, name: str, records: Sequence[RowRecord]) -> TracedEpisode:
    first = records[0]
    calls = {call.id: call for record in records for call in record.calls}
    timed = [one for one in calls.values() if 0 < one.asked_at <= one.answered_at]
    facts = {"task": first.task_index, "row": name, "cause": first.cause}
    span = Slice(f"{kind} task {first.task_index}", first.started_at, first.ended_at, facts)
    return TracedEpisode(first.cell, span, tuple(timed))


def build_trace(
    rows: Sequence[Row], episodes: Sequence[TracedEpisode], events: Sequence[Row]
) -> dict[str, Any]:
    """Steps, episodes with their calls, and events as a trace. Pure.

    Its times are microseconds since `startedAtUnixS`.
    """
    zero = min(
        [row["unix_time_s"] - row["time/step_s"] for row in rows]
        + [one.slice.begin for one in episodes]
    )
    writer = TraceWriter(zero)
    writer.name_process(TRAINER_PID, "trainer")
    for step, phases in map(place_phases, rows):
        writer.add_slice(TRAINER_PID, 1, step)
        for phase in phases:
            writer.add_slice(TRAINER_PID, 1, phase)
    cells = sorted({one.cell for one in episodes})
    for number, cell in enumerate(cells):
        own = [one for one in episodes if one.cell == cell]
        pid = FIRST_CELL_PID + 2 * number
        writer.name_process(pid, f"{cell}: model calls")
        _add_calls(writer, pid, own)
        writer.name_process(pid + 1, f"{cell}: episodes")
        _add_episodes(writer, pid + 1, own)
    writer.name_process(EVENTS_PID, "events")
    for place, role in enumerate(sorted({str(one["role"]) for one in events}), start=1):
        writer.name_thread(EVENTS_PID, place, role or "?")
        for one in events:
            if str(one["role"]) == role:
                _add_event(writer, place, one)
    return {
        "traceEvents": writer.events,
        "displayTimeUnit": "ms",
        "otherData": {"startedAtUnixS": zero, "note": CLOCK_NOTE},
    }


class TraceWriter:
    """Collects the events of a trace whose time begins at a Unix time."""

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self.events: list[TraceEvent] = []

    def name_process(self, pid: int, name: str) -> None:
        """Title of a process; processes are shown in the order of their numbers."""
        self._add_metadata("process_name", pid, 0, name=name)
        self._add_metadata("process_sort_index", pid, 0, sort_index=pid)

    def name_thread(self, pid: int, tid: int, name: str) -> None:
        """Title of a thread."""
        self._add_metadata("thread_name", pid, tid, name=name)
        self._add_metadata("thread_sort_index", pid, tid, sort_index=tid)

    def add_slice(self, pid: int, tid: int, one: Slice) -> None:
        """A stretch of time on a thread."""
        self.events.append(
            {
                "ph": "X",
                "name": one.name,
                "pid": pid,
                "tid": tid,
                "ts": self._scale(one.begin),
                # Both ends are rounded alike, so that slices that nest still do.
                "dur": self._scale(one.end) - self._scale(one.begin),
                "args": dict(one.facts),
            }
        )

    def add_instant(self, pid: int, tid: int, name: str, at: float, facts: Row) -> None:
        """A moment on a thread."""
        event = {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid}
        self.events.append(event | {"ts": self._scale(at), "args": dict(facts)})

    def add_count(self, pid: int, name: str, at: float, value: int) -> None:
        """A number from a moment on."""
        event = {"ph": "C", "name": name, "pid": pid, "ts": self._scale(at)}
        self.events.append(event | {"args": {name: value}})

    def _scale(self, at: float) -> int:
        return max(0, round((at - self._zero) * 1e6))  # an event may have begun before

    def _add_metadata(self, what: str, pid: int, tid: int, **facts: Any) -> None:
        self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": facts})


def place_phases(row: Row) -> tuple[Slice, list[Slice]]:
    """A step and its phases: these follow one another from its begin. Pure."""
    end, step_s = float(row["unix_time_s"]), float(row["time/step_s"])
    at = end - step_s
    facts = {name: row[name] for name in ("reward/mean", "limit", "version") if name in row}
    step = Slice(f"step {row['step']}", at, end, facts)
    phases = []
    for phase in PHASE_ORDER:
        seconds = get_number(row, f"time/{phase}_s") or 0.0
        if seconds > 0 and at < end:
            until = min(at + seconds, end)
            phases.append(Slice(phase, at, until))
            at = until
    return step, phases


def assign_lanes(slices: Sequence[Slice]) -> list[int]:
    """A lane for each slice, from 0: as few as may be, so that no two of a lane overlap. Pure."""
    lanes = [0] * len(slices)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    opened = 0
    for place in sorted(range(len(slices)), key=lambda one: slices[one].begin):
        while busy and busy[0][0] <= slices[place].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lanes[place] = heapq.heappop(free)
        else:
            lanes[place], opened = opened, opened + 1
        heapq.heappush(busy, (slices[place].end, lanes[place]))
    return lanes


def _add_calls(writer: TraceWriter, pid: int, episodes: Iterable[TracedEpisode]) -> None:
    """Model calls by replica, and how many are under way at each."""
    by_replica: dict[int, list[Slice]] = {}
    for one in episodes:
        for call in one.calls:
            facts = {
                "reply_tokens": call.reply_tokens,
                "prompt_tokens": call.prompt_tokens,
                "cached_tokens": call.cached_tokens,
                "finish": call.finish_reason,
            }
            span = Slice(one.slice.name, call.asked_at, call.answered_at, facts)
            by_replica.setdefault(call.replica, []).append(span)
    first_tid = 1
    for replica in sorted(by_replica):
        slices = by_replica[replica]
        name = f"replica {replica}" if replica >= 0 else "recorded by agents"
        for at, value in count_under_way(slices):
            writer.add_count(pid, f"calls at {name}", at, value)
        first_tid += _add_lanes(writer, pid, first_tid, name, slices)


def _add_lanes(
    writer: TraceWriter, pid: int, first_tid: int, name: str, slices: Sequence[Slice]
) -> int:
    """Slices that may overlap; how many threads they took."""
    lanes = assign_lanes(slices)
    for lane in range(max(lanes, default=-1) + 1):
        writer.name_thread(pid, first_tid + lane, f"{name}, lane {lane}")
    for one, lane in zip(slices, lanes, strict=True):
        writer.add_slice(pid, first_tid + lane, one)
    return max(lanes, default=-1) + 1


def count_under_way(slices: Sequence[Slice]) -> Iterator[tuple[float, int]]:
    """Each moment at which the number of slices under way changes, with the number. Pure."""
    changes: dict[float, int] = {}
    for one in slices:
        changes[one.begin] = changes.get(one.begin, 0) + 1
        changes[one.end] = changes.get(one.end, 0) - 1
    count = 0
    for at in sorted(changes):
        count += changes[at]
        yield at, count


def _add_episodes(writer: TraceWriter, pid: int, episodes: Sequence[TracedEpisode]) -> None:
    """Episodes, with the times in which model calls of theirs were under way."""
    lanes = assign_lanes([one.slice for one in episodes])
    for lane in range(max(lanes, default=-1) + 1):
        writer.name_thread(pid, lane + 1, f"lane {lane}")
    for one, lane in zip(episodes, lanes, strict=True):
        writer.add_slice(pid, lane + 1, one.slice)
        for begin, end in merge_spans((call.asked_at, call.answered_at) for call in one.calls):
            inner = max(begin, one.slice.begin), min(end, one.slice.end)
            if inner[0] < inner[1]:
                writer.add_slice(pid, lane + 1, Slice("model call", *inner))


def _add_event(writer: TraceWriter, tid: int, row: Row) -> None:
    """An event; one that tells how long it took is a stretch that ends with it."""
    facts = {name: value for name, value in row.items() if name not in ("time", "role", "event")}
    name, at, took = str(row["event"]), float(row["time"]), facts.get("pause_s")
    if isinstance(seconds := facts.get("seconds"), dict):
        took = sum(one for one in seconds.values() if isinstance(one, int | float))
    if isinstance(took, int | float) and took > 0:
        writer.add_slice(EVENTS_PID, tid, Slice(name, at - took, at, facts))
    else:
        writer.add_instant(EVENTS_PID, tid, name, at, facts)
