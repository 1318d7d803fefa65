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
from areal_hpc.rundir.telemetry.spans import Span
from areal_hpc.view.timing.timeline import (
    EPISODES_LANE,
    Timeline,
    assign_lanes,
    is_lane_of_calls,
    iterate_counts_under_way,
    list_lanes,
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
    write_atomic_private(out, msgspec.json.encode(_Trace(timeline, events).build()))
    lanes = [
        (one.name, lane, spans) for one in timeline.processes for lane, spans in list_lanes(one)
    ]
    episodes = sum(len(spans) for _, lane, spans in lanes if lane == EPISODES_LANE)
    calls = sum(len(spans) for name, lane, spans in lanes if is_lane_of_calls(name, lane))
    return TraceReport(len(rows), episodes, calls, tuple(problems))


class _Trace:
    """Steps, processes and events as a trace, whose times are microseconds since the first."""

    def __init__(self, timeline: Timeline, run_events: Sequence[JsonRow]) -> None:
        self._timeline, self._run_events = timeline, run_events
        begins = [span.begin for process in timeline.processes for span in process.spans]
        self._zero = min([timeline.begin, *begins])
        self._events: list[dict[str, Any]] = []

    def build(self) -> dict[str, Any]:
        self._name("process", STEPS_PID, 0, "steps")
        for step in self._timeline.steps:
            self._add_span(STEPS_PID, 1, step)
        pids: dict[str, int] = {}
        threads: dict[int, int] = {}
        for process in self._timeline.processes:  # a start each
            title = f"{process.name} ({process.node})" if process.node else process.name
            pid = pids.setdefault(title, FIRST_PROCESS_PID + len(pids))
            self._name("process", pid, 0, title)
            for lane, spans in list_lanes(process):
                first = threads.get(pid, 1)
                threads[pid] = first + self._add_lane(pid, first, process.name, lane, spans)
        self._name("process", EVENTS_PID, 0, "events")
        for place, role in enumerate(sorted({str(one["role"]) for one in self._run_events}), 1):
            self._name("thread", EVENTS_PID, place, role or "?")
            for row in self._run_events:
                if str(row["role"]) == role:
                    self._add_run_event(place, row)
        return {
            "traceEvents": self._events,
            "displayTimeUnit": "ms",
            "otherData": {"startedAtUnixS": self._zero, "note": " ".join(self._timeline.notes)},
        }

    def _add_lane(self, pid: int, first: int, process: str, lane: str, spans: list[Span]) -> int:
        """Add spans on as many threads as they need, the number of which is returned."""
        if is_lane_of_calls(process, lane):
            for at, count in iterate_counts_under_way(spans):
                name, ts = f"calls at {lane}", self._to_microseconds(at)
                self._add("C", name, pid, ts=ts, args={name: count})
        lanes = assign_lanes(spans)
        threads = max(lanes, default=-1) + 1
        for number in range(threads):
            title = lane or "states"
            title = f"{title}, {number}" if threads > 1 else title
            self._name("thread", pid, first + number, title)
        for span, number in zip(spans, lanes, strict=True):
            self._add_span(pid, first + number, span)
        return threads

    def _add_run_event(self, tid: int, row: JsonRow) -> None:
        facts = {key: value for key, value in row.items() if key not in ("time", "role", "event")}
        name, at, took = str(row["event"]), float(row["time"]), facts.get("pause_s")
        if isinstance(seconds := facts.get("seconds"), dict):
            took = sum(one for one in seconds.values() if isinstance(one, int | float))
        if isinstance(took, int | float) and took > 0:
            self._add_span(EVENTS_PID, tid, Span(name, at - took, at, facts=facts))
        else:
            ts = self._to_microseconds(at)
            self._add("i", name, EVENTS_PID, s="t", tid=tid, ts=ts, args=facts)

    def _name(self, what: str, pid: int, tid: int, title: str) -> None:
        index = tid if what == "thread" else pid
        self._add("M", f"{what}_name", pid, tid=tid, args={"name": title})
        self._add("M", f"{what}_sort_index", pid, tid=tid, args={"sort_index": index})

    def _add_span(self, pid: int, tid: int, span: Span) -> None:
        # Both ends are rounded alike, so that spans that nest still do.
        begin, end = self._to_microseconds(span.begin), self._to_microseconds(span.end)
        self._add("X", span.name, pid, tid=tid, ts=begin, dur=end - begin, args=span.facts)

    def _add(self, kind: str, name: str, pid: int, **fields: Any) -> None:
        self._events.append({"ph": kind, "name": name, "pid": pid, **fields})

    def _to_microseconds(self, unix_time: float) -> int:
        return max(0, round((unix_time - self._zero) * 1e6))  # an event may have begun before
