"""Timeline of a run: the spans of all its processes, in the time of the ledger's node.

`areal-hpc trace` writes it in the trace format of Chrome, which Perfetto opens. A process of the
trace is a process of the run, the steps, or the events. Its threads are the states of the process,
and lanes for spans that overlap.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.errors import RecipeError
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.files import write_atomic_private
from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import read_all_events
from areal_hpc.rundir.telemetry.span_reader import ProcessSpans, read_spans, split_process_name
from areal_hpc.rundir.telemetry.spans import Span
from areal_hpc.view.batch_episodes import BatchEpisode, read_batch_episodes
from areal_hpc.view.formatting import get_number

TRAINER_PROCESS = "trainer-trainer"
EPISODES_LANE = "episodes"

EpisodeKey = tuple[int, int, int, int]
"""Ticket, attempt, evaluated step or -1, and number of an episode in its ticket."""


@dataclass(frozen=True, slots=True)
class Timeline:
    begin: float
    end: float
    steps: Sequence[Span]
    processes: Sequence[ProcessSpans]
    notes: Sequence[str] = ()


def assign_lanes(spans: Sequence[Span]) -> list[int]:
    """Return a lane for each span, from 0: the fewest in which no two spans of a lane overlap."""
    lanes = [0] * len(spans)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    opened = 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index].begin):
        while busy and busy[0][0] <= spans[index].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lanes[index] = heapq.heappop(free)
        else:
            lanes[index], opened = opened, opened + 1
        heapq.heappush(busy, (spans[index].end, lanes[index]))
    return lanes


def iterate_counts_under_way(spans: Sequence[Span]) -> Iterator[tuple[float, int]]:
    """Yield each time at which the number of spans under way changes, with the number."""
    changes: Counter[float] = Counter()
    for span in spans:
        changes[span.begin] += 1
        changes[span.end] -= 1
    count = 0
    for at in sorted(changes):
        count += changes[at]
        yield at, count


def list_lanes(process: ProcessSpans) -> Iterator[tuple[str, list[Span]]]:
    for lane in process.lanes:
        yield lane, [span for span in process.spans if span.lane == lane]


def is_lane_of_calls(process_name: str, lane: str) -> bool:
    return split_process_name(process_name)[1] == "proxy" and lane.startswith("replica ")


def select_timed_rows(
    rows: Iterable[JsonRow], first_step: float, last_step: float
) -> list[JsonRow]:
    return [
        row
        for row in rows
        if first_step <= row["step"] <= last_step
        and get_number(row, "unix_time_s")
        and get_number(row, "time/step_s")
    ]


def read_timeline(
    paths: RunPaths, rows: Sequence[JsonRow], from_time: float, to_time: float, problems: list[str]
) -> Timeline:
    """Read the timeline between two Unix times; `rows` are the metrics of the steps there.

    Trained episodes have their reward and row. Files that cannot be read are added to `problems`.
    """
    processes = read_spans(paths, from_time, to_time)
    trained = read_batch_episodes(paths, [row["step"] for row in rows if row["step"] > 0], problems)
    episodes = {
        (episode.ticket_id, episode.attempt, -1, episode.episode): episode for episode in trained
    }
    steps = [
        Span(
            f"step {row['step']}",
            row["unix_time_s"] - row["time/step_s"],
            row["unix_time_s"],
            facts={name: row[name] for name in ("reward/mean", "limit", "version") if name in row},
        )
        for row in rows
    ]
    notes = [] if processes else ["No spans of this time are recorded."]
    if lost := sum(process.lost for process in processes):
        notes.append(f"{lost} spans were lost, because the storage did not take them.")
    named = [
        replace(
            process,
            spans=[
                _name_episode(span, episodes) if span.lane == EPISODES_LANE else span
                for span in process.spans
            ],
        )
        for process in processes
    ]
    return Timeline(from_time, to_time, steps, named, notes)


def _name_episode(span: Span, trained: dict[EpisodeKey, BatchEpisode]) -> Span:
    ticket_id, _, eval_step, number = key = (
        *(span.facts.get("ticket_id", -1), span.facts.get("attempt", -1)),
        *(span.facts.get("eval_step", -1), span.facts.get("episode", -1)),
    )
    name = f"ticket {ticket_id} episode {number}"
    facts: dict[str, Any] = {}
    if (episode := trained.get(key)) is not None:
        facts = {
            "step": episode.step,
            "reward": episode.mean_row_reward,
            "row": episode.first_row_name,
        }
    return msgspec.structs.replace(
        span,
        name=name if eval_step < 0 else f"evaluation {eval_step} {name}",
        facts=span.facts | facts,
    )


def find_span_bounds(paths: RunPaths) -> tuple[float, float]:
    processes = read_spans(paths)
    begin = min((process.begin for process in processes), default=math.nan)
    return begin, max((process.end for process in processes), default=math.nan)


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
    events = [row for row in read_all_events(paths.events) if begin < row["time"] <= end]
    write_atomic_private(out, msgspec.json.encode(_Trace(timeline, events).build()))
    lanes = [
        (process.name, lane, spans)
        for process in timeline.processes
        for lane, spans in list_lanes(process)
    ]
    episodes = sum(len(spans) for _, lane, spans in lanes if lane == EPISODES_LANE)
    calls = sum(len(spans) for name, lane, spans in lanes if is_lane_of_calls(name, lane))
    return TraceReport(len(rows), episodes, calls, tuple(problems))


class _Trace:
    """Trace of steps, processes and events, whose times are microseconds since the first."""

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
        for process in self._timeline.processes:  # one per start
            title = f"{process.name} ({process.node})" if process.node else process.name
            pid = pids.setdefault(title, FIRST_PROCESS_PID + len(pids))
            self._name("process", pid, 0, title)
            for lane, spans in list_lanes(process):
                first = threads.get(pid, 1)
                threads[pid] = first + self._add_lane(pid, first, process.name, lane, spans)
        self._name("process", EVENTS_PID, 0, "events")
        roles = sorted({str(row["role"]) for row in self._run_events})
        for thread, role in enumerate(roles, 1):
            self._name("thread", EVENTS_PID, thread, role or "?")
            for row in self._run_events:
                if str(row["role"]) == role:
                    self._add_run_event(thread, row)
        return {
            "traceEvents": self._events,
            "displayTimeUnit": "ms",
            "otherData": {"startedAtUnixS": self._zero, "note": " ".join(self._timeline.notes)},
        }

    def _add_lane(self, pid: int, first: int, process: str, lane: str, spans: list[Span]) -> int:
        """Add spans on as many threads as they need, and return the number of threads."""
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
            took = sum(value for value in seconds.values() if isinstance(value, int | float))
        if isinstance(took, int | float) and took > 0:
            self._add_span(EVENTS_PID, tid, Span(name, at - took, at, facts=facts))
        else:
            ts = self._to_microseconds(at)
            self._add("i", name, EVENTS_PID, s="t", tid=tid, ts=ts, args=facts)

    def _name(self, kind: str, pid: int, tid: int, title: str) -> None:
        index = tid if kind == "thread" else pid
        self._add("M", f"{kind}_name", pid, tid=tid, args={"name": title})
        self._add("M", f"{kind}_sort_index", pid, tid=tid, args={"sort_index": index})

    def _add_span(self, pid: int, tid: int, span: Span) -> None:
        # Both ends are rounded the same way, so that nested spans stay nested.
        begin, end = self._to_microseconds(span.begin), self._to_microseconds(span.end)
        self._add("X", span.name, pid, tid=tid, ts=begin, dur=end - begin, args=span.facts)

    def _add(self, kind: str, name: str, pid: int, **fields: Any) -> None:
        self._events.append({"ph": kind, "name": name, "pid": pid, **fields})

    def _to_microseconds(self, unix_time: float) -> int:
        return max(0, round((unix_time - self._zero) * 1e6))  # an event may have begun before
