"""What the page of a run's timeline shows: lanes of its processes, drawn as fine as a screen is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from areal_hpc.errors import ArealError, RecipeError
from areal_hpc.metrics.step_metrics import measure_step_times, read_metrics
from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.answers.slow_run import explain_slow_run
from areal_hpc.view.dashboard.run_pages import describe_step_times
from areal_hpc.view.dashboard.summary_page import describe_answer
from areal_hpc.view.timing.timeline import (
    TRAINER_PROCESS,
    Slice,
    Timeline,
    Track,
    assign_lanes,
    find_span_bounds,
    iterate_counts_under_way,
    read_timeline,
    select_timed_rows,
)

DEFAULT_SHOWN_STEPS = 3
MIN_OVERLAP_S = 0.001
MAX_LISTED_STEPS = 200
MAX_SLICES_ACROSS_WIDTH = 1200
BIN_COUNT = 300
MAX_LANES_PER_TRACK = 24
MAX_LONGEST_SLICES = 12

JsonObject = dict[str, Any]


def describe_timeline(paths: RunPaths, query: Mapping[str, str]) -> JsonObject:
    """The timeline between `from` and `to` (Unix seconds), or of the last steps."""
    rows = select_timed_rows(read_metrics(paths.metrics), 0, math.inf)
    begin, end = _choose_time_window(paths, rows, query)
    inside = [
        row
        for row in rows
        if row["unix_time_s"] > begin + MIN_OVERLAP_S
        and row["unix_time_s"] - row["time/step_s"] < end - MIN_OVERLAP_S
    ]
    problems: list[str] = []
    metrics_bytes = paths.metrics.stat().st_size if paths.metrics.exists() else 0
    timeline = read_timeline(paths, inside, begin, end, problems)
    return {
        "begin": begin,
        "end": end,
        "steps": [
            {
                "step": row["step"],
                "begin": row["unix_time_s"] - row["time/step_s"],
                "end": row["unix_time_s"],
                "limit": row.get("limit"),
                "reward": row.get("reward/mean"),
            }
            for row in rows[-MAX_LISTED_STEPS:]
        ],
        "shown_steps": [row["step"] for row in inside],
        "processes": describe_processes(timeline),
        "longest": list_longest_slices(timeline),
        "step_times": describe_step_times(measure_step_times(inside)),
        "answer": _explain_slow_run_once(paths, metrics_bytes),
        "notes": [*timeline.notes, *problems[:5]],
    }


def _choose_time_window(
    paths: RunPaths, rows: Sequence[JsonRow], query: Mapping[str, str]
) -> tuple[float, float]:
    last = rows[-DEFAULT_SHOWN_STEPS:]
    if last:
        begin = last[0]["unix_time_s"] - last[0]["time/step_s"]
        end = last[-1]["unix_time_s"]
    else:  # a run that begins
        begin, end = find_span_bounds(paths)
    begin, end = _parse_time(query, "from", begin), _parse_time(query, "to", end)
    if math.isnan(begin) or math.isnan(end):
        raise RecipeError("nothing of this run's time is recorded yet", key="timeline")
    if end <= begin:
        raise RecipeError(f"expected a time after from={begin}, got to={end}", key="to")
    return begin, end


def _parse_time(query: Mapping[str, str], key: str, default: float) -> float:
    if not (text := query.get(key, "")):
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RecipeError(f"expected Unix seconds, got {text[:50]!r}", key=key)
    return value


def describe_processes(timeline: Timeline) -> list[JsonObject]:
    found: dict[tuple[str, str], JsonObject] = {}
    for track in timeline.tracks:
        process = found.setdefault(
            (track.process, track.node),
            {"process": track.process, "node": track.node, "shares": [], "lanes": []},
        )
        if not track.lane:
            process["shares"] = compute_time_shares_by_name(
                track.slices, timeline.begin, timeline.end
            )
        process["lanes"] += _describe_lanes(track, timeline.begin, timeline.end)
    return sorted(found.values(), key=lambda one: not one["process"].startswith(TRAINER_PROCESS))


def compute_time_shares_by_name(
    slices: Sequence[Slice], from_time: float, to_time: float
) -> list[tuple[str, float]]:
    seconds: dict[str, float] = {}
    for one in slices:
        inside = min(one.end, to_time) - max(one.begin, from_time)
        seconds[one.name] = seconds.get(one.name, 0.0) + max(0.0, inside)
    ranked = sorted(seconds.items(), key=lambda one: -one[1])
    return [(name, spent / (to_time - from_time)) for name, spent in ranked if spent > 0]


def _describe_lanes(track: Track, from_time: float, to_time: float) -> Iterator[JsonObject]:
    slices = [one for one in track.slices if one.end >= from_time and one.begin <= to_time]
    if track.is_of_calls:
        counts = average_slices_under_way_by_bin(slices, from_time, to_time)
        yield {"title": f"calls at {track.lane}", "most": max(counts, default=0), "counts": counts}
        return
    lanes = assign_lanes(slices)
    opened = max(lanes, default=-1) + 1
    for lane in range(min(opened, MAX_LANES_PER_TRACK)):
        own = [one for one, its in zip(slices, lanes, strict=True) if its == lane]
        title = "" if lane else track.lane or "states"
        yield {"title": title, "slices": describe_slices(own, from_time, to_time)}
    if opened > MAX_LANES_PER_TRACK:
        yield {"title": f"and {opened - MAX_LANES_PER_TRACK} more at once", "slices": []}


def describe_slices(
    slices: Sequence[Slice], from_time: float, to_time: float
) -> list[tuple[float, float, str, JsonObject]]:
    """Begin, end (seconds from `from_time`), name and facts of slices that do not overlap. Pure.

    Neighbors too short to be told apart are one slice, whose facts say how many they are.
    """
    width_s = (to_time - from_time) / MAX_SLICES_ACROSS_WIDTH
    found: list[tuple[float, float, str, JsonObject]] = []
    for one in sorted(slices, key=lambda one: one.begin):
        first, last = one.begin - from_time, one.end - from_time
        if found and last - found[-1][0] < width_s:
            earlier = found[-1]
            count = earlier[3].get("slices", 1) + 1
            name = earlier[2] if earlier[2] == one.name else "several"
            found[-1] = (earlier[0], last, name, {"slices": count})
        else:
            found.append((round(first, 5), round(last, 5), one.name, dict(one.facts)))
    return found


def average_slices_under_way_by_bin(
    slices: Sequence[Slice], from_time: float, to_time: float
) -> list[float]:
    width_s = (to_time - from_time) / BIN_COUNT
    sums = [0.0] * BIN_COUNT
    before, count = from_time, 0
    for at, later in [*iterate_counts_under_way(slices), (to_time, 0)]:
        at = min(max(at, from_time), to_time)
        first, last = int((before - from_time) / width_s), int((at - from_time) / width_s)
        for place in range(first, min(last, BIN_COUNT - 1) + 1) if count else ():
            low, high = from_time + place * width_s, from_time + (place + 1) * width_s
            sums[place] += count * max(0.0, min(high, at) - max(low, before))
        before, count = at, later
    return [round(one / width_s, 2) for one in sums]


def list_longest_slices(timeline: Timeline) -> list[JsonObject]:
    found = [
        (one.seconds, track, one) for track in timeline.tracks if track.lane for one in track.slices
    ]
    found.sort(key=lambda one: -one[0])
    return [
        {
            "name": one.name,
            "process": track.process,
            "lane": track.lane,
            "seconds": seconds,
            "begin": one.begin,
            "end": one.end,
            "facts": dict(one.facts),
        }
        for seconds, track, one in found[:MAX_LONGEST_SLICES]
    ]


@lru_cache(maxsize=16)
def _explain_slow_run_once(paths: RunPaths, _metrics_bytes: int) -> JsonObject:
    try:
        return describe_answer(explain_slow_run(paths))
    except ArealError as error:
        return {"headline": f"cannot be told: {error}", "findings": [], "hints": []}
