"""Timeline of a run: what each process did from when to when, in the time of the ledger's node.

It comes from the spans of all processes.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.span_reader import ProcessSpans, read_spans, split_process_name
from areal_hpc.rundir.telemetry.spans import Span
from areal_hpc.view.batch_episodes import BatchEpisode, read_batch_episodes
from areal_hpc.view.metric_values import get_number

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
    """A lane for each span, from 0: as few as may be, so that no two of a lane overlap."""
    lanes = [0] * len(spans)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    opened = 0
    for place in sorted(range(len(spans)), key=lambda one: spans[one].begin):
        while busy and busy[0][0] <= spans[place].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lanes[place] = heapq.heappop(free)
        else:
            lanes[place], opened = opened, opened + 1
        heapq.heappush(busy, (spans[place].end, lanes[place]))
    return lanes


def iterate_counts_under_way(spans: Sequence[Span]) -> Iterator[tuple[float, int]]:
    """Each moment at which the number of spans under way changes, with the number."""
    changes: Counter[float] = Counter()
    for one in spans:
        changes[one.begin] += 1
        changes[one.end] -= 1
    count = 0
    for at in sorted(changes):
        count += changes[at]
        yield at, count


def list_lanes(process: ProcessSpans) -> Iterator[tuple[str, list[Span]]]:
    """A process's own states, and what it did beside them, with their spans."""
    for lane in process.lanes:
        yield lane, [one for one in process.spans if one.lane == lane]


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
    """The timeline between two Unix times; `rows` are the metrics of the steps there.

    Trained episodes say their reward and row. What cannot be read is named in `problems`.
    """
    processes = read_spans(paths, from_time, to_time)
    trained = read_batch_episodes(paths, [row["step"] for row in rows if row["step"] > 0], problems)
    episodes = {(one.ticket_id, one.attempt, -1, one.episode): one for one in trained}
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
    if lost := sum(one.lost for one in processes):
        notes.append(f"{lost} spans were lost, because the storage did not take them.")
    named = [
        replace(
            one,
            spans=[
                _name_episode(span, episodes) if span.lane == EPISODES_LANE else span
                for span in one.spans
            ],
        )
        for one in processes
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
    begin = min((one.begin for one in processes), default=math.nan)
    return begin, max((one.end for one in processes), default=math.nan)
