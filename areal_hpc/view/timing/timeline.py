"""Timeline of a run: what each process did from when to when, in the time of the ledger's node.

It comes from the spans of all processes.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.span_reader import ProcessSpans, read_spans, split_process_name
from areal_hpc.trainer.batch.batch_metrics import merge_spans
from areal_hpc.view.batch_episodes import BatchEpisode, read_batch_episodes
from areal_hpc.view.metric_values import get_number

TRAINER_PROCESS = "trainer-trainer"
EPISODES_LANE = "episodes"

EpisodeKey = tuple[int, int, int, int]
"""Ticket, attempt, evaluated step or -1, and number of an episode in its ticket."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time with a name, in Unix seconds."""

    name: str
    begin: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def assign_lanes(slices: Sequence[Slice]) -> list[int]:
    """A lane for each slice, from 0: as few as may be, so that no two of a lane overlap."""
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


def iterate_counts_under_way(slices: Sequence[Slice]) -> Iterator[tuple[float, int]]:
    """Each moment at which the number of slices under way changes, with the number."""
    changes: dict[float, int] = {}
    for one in slices:
        changes[one.begin] = changes.get(one.begin, 0) + 1
        changes[one.end] = changes.get(one.end, 0) - 1
    count = 0
    for at in sorted(changes):
        count += changes[at]
        yield at, count


@dataclass(frozen=True, slots=True)
class Track:
    process: str
    lane: str
    slices: Sequence[Slice]
    node: str = ""
    call_spans_by_slice: Sequence[Sequence[tuple[float, float]]] = ()
    """On the lane of episodes: when model calls of each of them were under way."""

    @property
    def is_of_calls(self) -> bool:
        is_proxy = split_process_name(self.process)[1] == "proxy"
        return is_proxy and self.lane.startswith("replica ")


@dataclass(frozen=True, slots=True)
class Timeline:
    begin: float
    end: float
    steps: Sequence[Slice]
    tracks: Sequence[Track]
    notes: Sequence[str] = ()


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

    What cannot be read is named in `problems`.
    """
    processes = read_spans(paths, from_time, to_time)
    tracks = [track for one in processes for track in _build_tracks(one)]
    trained = read_batch_episodes(paths, [row["step"] for row in rows if row["step"] > 0], problems)
    steps = [
        Slice(
            f"step {row['step']}",
            row["unix_time_s"] - row["time/step_s"],
            row["unix_time_s"],
            {name: row[name] for name in ("reward/mean", "limit", "version") if name in row},
        )
        for row in rows
    ]
    notes = [] if processes else ["No spans of this time are recorded."]
    if lost := sum(one.lost for one in processes):
        notes.append(f"{lost} spans were lost, because the storage did not take them.")
    return Timeline(from_time, to_time, steps, _annotate_episodes(tracks, trained), notes)


def _build_tracks(process: ProcessSpans) -> Iterator[Track]:
    by_lane: dict[str, list[Slice]] = {lane: [] for lane in process.lanes}
    for span in process.spans:
        by_lane[span.lane].append(Slice(span.name, span.begin, span.end, span.facts))
    for lane, slices in by_lane.items():
        yield Track(process.name, lane, slices, process.node)


def _get_episode_key(span_fields: Mapping[str, Any]) -> EpisodeKey:
    return (
        *(span_fields.get("ticket_id", -1), span_fields.get("attempt", -1)),
        *(span_fields.get("eval_step", -1), span_fields.get("episode", -1)),
    )


def _annotate_episodes(tracks: Sequence[Track], episodes: Sequence[BatchEpisode]) -> list[Track]:
    """Tracks whose episodes say their reward and row, and when calls of theirs were under way."""
    rows: dict[EpisodeKey, dict[str, Any]] = {
        (one.ticket_id, one.attempt, -1, one.episode): {
            "step": one.step,
            "reward": one.mean_row_reward,
            "row": one.first_row_name,
        }
        for one in episodes
    }
    calls: dict[EpisodeKey, list[tuple[float, float]]] = {}
    for track in tracks:
        if track.is_of_calls:
            for one in track.slices:
                calls.setdefault(_get_episode_key(one.facts), []).append((one.begin, one.end))
    found = []
    for track in tracks:
        if track.lane == EPISODES_LANE:
            keys = [_get_episode_key(one.facts) for one in track.slices]
            slices = [
                replace(one, name=_name_episode(key), facts={**one.facts, **rows.get(key, {})})
                for one, key in zip(track.slices, keys, strict=True)
            ]
            times = [list(merge_spans(calls.get(key, []))) for key in keys]
            track = replace(track, slices=slices, call_spans_by_slice=times)
        found.append(track)
    return found


def _name_episode(key: EpisodeKey) -> str:
    ticket_id, _, eval_step, episode = key
    name = f"ticket {ticket_id} episode {episode}"
    return name if eval_step < 0 else f"evaluation {eval_step} {name}"


def find_span_bounds(paths: RunPaths) -> tuple[float, float]:
    processes = read_spans(paths)
    begin = min((one.begin for one in processes), default=math.nan)
    return begin, max((one.end for one in processes), default=math.nan)
