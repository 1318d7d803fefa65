"""What the page of a run's timeline shows: lanes of its processes, drawn as fine as a screen is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from areal_hpc.errors import ArealError, RecipeError
from areal_hpc.metrics.step_metrics import measure_step_times, read_metrics
from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.spans import Span
from areal_hpc.view.answers.slow_run import explain_slow_run
from areal_hpc.view.dashboard.run_pages import describe_answer
from areal_hpc.view.timeline import (
    TRAINER_PROCESS,
    Timeline,
    assign_lanes,
    find_span_bounds,
    is_lane_of_calls,
    iterate_counts_under_way,
    list_lanes,
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
    times = measure_step_times(inside)
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
        "longest": list_longest_spans(timeline),
        "step_times": times and times._asdict(),
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
    for one in timeline.processes:  # a start each
        process = found.setdefault(
            (one.name, one.node),
            {"process": one.name, "node": one.node, "shares": [], "lanes": []},
        )
        for lane, spans in list_lanes(one):
            if not lane:
                process["shares"] = compute_time_shares(spans, timeline.begin, timeline.end)
            process["lanes"] += _describe_lanes(one.name, lane, spans, timeline.begin, timeline.end)
    return sorted(found.values(), key=lambda one: not one["process"].startswith(TRAINER_PROCESS))


def compute_time_shares(
    spans: Sequence[Span], from_time: float, to_time: float
) -> list[tuple[str, float]]:
    shares: dict[str, float] = dict.fromkeys((one.name for one in spans), 0.0)
    for one in spans:
        inside = min(one.end, to_time) - max(one.begin, from_time)
        shares[one.name] += max(0.0, inside) / (to_time - from_time)
    return sorted(((name, one) for name, one in shares.items() if one > 0), key=lambda one: -one[1])


def _describe_lanes(
    process: str, lane: str, spans: Sequence[Span], from_time: float, to_time: float
) -> Iterator[JsonObject]:
    shown = [one for one in spans if one.end >= from_time and one.begin <= to_time]
    if is_lane_of_calls(process, lane):
        counts = average_spans_by_bin(shown, from_time, to_time)
        yield {"title": f"calls at {lane}", "most": max(counts, default=0), "counts": counts}
        return
    lanes = assign_lanes(shown)
    opened = max(lanes, default=-1) + 1
    for number in range(min(opened, MAX_LANES_PER_TRACK)):
        own = [one for one, its in zip(shown, lanes, strict=True) if its == number]
        title = "" if number else lane or "states"
        yield {"title": title, "slices": describe_slices(own, from_time, to_time)}
    if opened > MAX_LANES_PER_TRACK:
        yield {"title": f"and {opened - MAX_LANES_PER_TRACK} more at once", "slices": []}


def describe_slices(
    spans: Sequence[Span], from_time: float, to_time: float
) -> list[tuple[float, float, str, JsonObject]]:
    """Begin, end (seconds from `from_time`), name and facts of spans that do not overlap. Pure.

    Neighbors too short to be told apart are one, whose facts say how many they are.
    """
    width_s = (to_time - from_time) / MAX_SLICES_ACROSS_WIDTH
    found: list[tuple[float, float, str, JsonObject]] = []
    for one in sorted(spans, key=lambda one: one.begin):
        first, last = one.begin - from_time, one.end - from_time
        if found and last - found[-1][0] < width_s:
            earlier = found[-1]
            count = earlier[3].get("slices", 1) + 1
            name = earlier[2] if earlier[2] == one.name else "several"
            found[-1] = (earlier[0], last, name, {"slices": count})
        else:
            found.append((round(first, 5), round(last, 5), one.name, dict(one.facts)))
    return found


def average_spans_by_bin(spans: Sequence[Span], from_time: float, to_time: float) -> list[float]:
    width_s = (to_time - from_time) / BIN_COUNT
    sums = [0.0] * BIN_COUNT
    before, count = from_time, 0
    for at, later in [*iterate_counts_under_way(spans), (to_time, 0)]:
        at = min(max(at, from_time), to_time)
        first, last = int((before - from_time) / width_s), int((at - from_time) / width_s)
        for place in range(first, min(last, BIN_COUNT - 1) + 1) if count else ():
            low, high = from_time + place * width_s, from_time + (place + 1) * width_s
            sums[place] += count * max(0.0, min(high, at) - max(low, before))
        before, count = at, later
    return [round(one / width_s, 2) for one in sums]


def list_longest_spans(timeline: Timeline) -> list[JsonObject]:
    found = [(process, one) for process in timeline.processes for one in process.spans if one.lane]
    found.sort(key=lambda one: one[1].begin - one[1].end)
    return [
        {
            "name": one.name,
            "process": process.name,
            "lane": one.lane,
            "seconds": one.end - one.begin,
            "begin": one.begin,
            "end": one.end,
            "facts": one.facts,
        }
        for process, one in found[:MAX_LONGEST_SLICES]
    ]


@lru_cache(maxsize=16)
def _explain_slow_run_once(paths: RunPaths, _metrics_bytes: int) -> JsonObject:
    try:
        return describe_answer(explain_slow_run(paths))
    except ArealError as error:
        return {"headline": f"cannot be told: {error}", "findings": [], "hints": []}
