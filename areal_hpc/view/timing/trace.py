"""Timeline of steps in the trace format of Chrome, which Perfetto opens: `areal-hpc trace`.

A process of the trace is one of the run's, the steps, or the events. Its threads are the process's
own states, and lanes for what it does side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.errors import RecipeError
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.atomic import write_atomic_private
from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import read_all_events
from areal_hpc.view.timing.timeline import (
    EPISODES_LANE,
    Slice,
    Timeline,
    Track,
    assign_lanes,
    iterate_counts_under_way,
    read_timeline,
    select_timed_rows,
)

STEPS_PID, EVENTS_PID, FIRST_PROCESS_PID = 1, 2, 10


@dataclass(frozen=True, slots=True)
class TraceReport:
    steps: int
    episodes: int
    calls: int
    problems: tuple[str, ...]


class TraceEventCollector:
    def __init__(self, zero: float) -> None:
        self._zero = zero
        self.events: list[dict[str, Any]] = []

    def name_process(self, pid: int, title: str) -> None:
        self._add("M", "process_name", pid, tid=0, args={"name": title})
        self._add("M", "process_sort_index", pid, tid=0, args={"sort_index": pid})

    def name_thread(self, pid: int, tid: int, title: str) -> None:
        self._add("M", "thread_name", pid, tid=tid, args={"name": title})
        self._add("M", "thread_sort_index", pid, tid=tid, args={"sort_index": tid})

    def add_slice(self, pid: int, tid: int, time_slice: Slice) -> None:
        # Both ends are rounded alike, so that slices that nest still do.
        begin, end = self._to_microseconds(time_slice.begin), self._to_microseconds(time_slice.end)
        facts = dict(time_slice.facts)
        self._add("X", time_slice.name, pid, tid=tid, ts=begin, dur=end - begin, args=facts)

    def add_run_event(self, tid: int, row: JsonRow) -> None:
        facts = {key: value for key, value in row.items() if key not in ("time", "role", "event")}
        name, at, took = str(row["event"]), float(row["time"]), facts.get("pause_s")
        if isinstance(seconds := facts.get("seconds"), dict):
            took = sum(one for one in seconds.values() if isinstance(one, int | float))
        if isinstance(took, int | float) and took > 0:
            self.add_slice(EVENTS_PID, tid, Slice(name, at - took, at, facts))
        else:
            begin = self._to_microseconds(at)
            self._add("i", name, EVENTS_PID, s="t", tid=tid, ts=begin, args=facts)

    def add_count(self, pid: int, name: str, unix_time: float, value: int) -> None:
        self._add("C", name, pid, ts=self._to_microseconds(unix_time), args={name: value})

    def _add(self, kind: str, name: str, pid: int, **fields: Any) -> None:
        self.events.append({"ph": kind, "name": name, "pid": pid, **fields})

    def _to_microseconds(self, unix_time: float) -> int:
        return max(0, round((unix_time - self._zero) * 1e6))  # an event may have begun before


def write_trace(paths: RunPaths, first_step: int, last_step: int, out: Path) -> TraceReport:
    if out.exists():
        raise RecipeError(f"{out} exists", key="--out", hint="name another file, or remove it")
    rows = select_timed_rows(read_metrics(paths.metrics), first_step, last_step)
    if not rows:
        raise RecipeError(
            f"no step from {first_step} to {last_step} has recorded times",
            key="--steps",
            hint="areal-hpc status RUN shows which steps were trained",
        )
    problems: list[str] = []
    begin = min(row["unix_time_s"] - row["time/step_s"] for row in rows)
    end = max(row["unix_time_s"] for row in rows)
    timeline = read_timeline(paths, rows, begin, end, problems)
    events = [one for one in read_all_events(paths.events) if begin < one["time"] <= end]
    write_atomic_private(out, msgspec.json.encode(build_trace(timeline, events)))
    episodes = sum(len(one.slices) for one in timeline.tracks if one.lane == EPISODES_LANE)
    calls = sum(len(one.slices) for one in timeline.tracks if one.is_of_calls)
    return TraceReport(len(rows), episodes, calls, tuple(problems))


def build_trace(timeline: Timeline, events: Sequence[JsonRow]) -> dict[str, Any]:
    """Steps, processes and events as a trace. Pure.

    Its times are microseconds since `startedAtUnixS`.
    """
    begins = [one.begin for track in timeline.tracks for one in track.slices]
    zero = min([timeline.begin, *begins])
    writer = TraceEventCollector(zero)
    writer.name_process(STEPS_PID, "steps")
    for step in timeline.steps:
        writer.add_slice(STEPS_PID, 1, step)
    processes = dict.fromkeys((one.process, one.node) for one in timeline.tracks)
    for pid, (process, node) in enumerate(processes, start=FIRST_PROCESS_PID):
        writer.name_process(pid, f"{process} ({node})" if node else process)
        own = [one for one in timeline.tracks if (one.process, one.node) == (process, node)]
        _add_tracks(writer, pid, own)
    writer.name_process(EVENTS_PID, "events")
    for place, role in enumerate(sorted({str(one["role"]) for one in events}), start=1):
        writer.name_thread(EVENTS_PID, place, role or "?")
        for one in events:
            if str(one["role"]) == role:
                writer.add_run_event(place, one)
    note = " ".join(timeline.notes)
    return {
        "traceEvents": writer.events,
        "displayTimeUnit": "ms",
        "otherData": {"startedAtUnixS": zero, "note": note},
    }


def _add_tracks(writer: TraceEventCollector, pid: int, tracks: Sequence[Track]) -> None:
    """Tracks of a process, each on as many threads as it needs."""
    first_tid = 1
    for track in tracks:
        if track.is_of_calls:
            for at, value in iterate_counts_under_way(track.slices):
                writer.add_count(pid, f"calls at {track.lane}", at, value)
        lanes = assign_lanes(track.slices)
        count = max(lanes, default=-1) + 1
        for lane in range(count):
            title = track.lane or "states"
            writer.name_thread(pid, first_tid + lane, f"{title}, {lane}" if count > 1 else title)
        for place, (one, lane) in enumerate(zip(track.slices, lanes, strict=True)):
            writer.add_slice(pid, first_tid + lane, one)
            for begin, end in track.call_spans_by_slice[place] if track.call_spans_by_slice else ():
                inner = max(begin, one.begin), min(end, one.end)
                if inner[0] < inner[1]:
                    writer.add_slice(pid, first_tid + lane, Slice("model call", *inner))
        first_tid += count
