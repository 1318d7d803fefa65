"""Data of the page of a run's timeline: lanes of its processes, as fine as a screen shows them."""

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
    """Describe the timeline between `from` and `to` (Unix seconds), or of the last steps."""
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
    else:  # no step has ended yet
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
    shown: dict[tuple[str, str], JsonObject] = {}
    for start in timeline.processes:
        process = shown.setdefault(
            (start.name, start.node),
            {"process": start.name, "node": start.node, "shares": [], "lanes": []},
        )
        for lane, spans in list_lanes(start):
            if not lane:
                process["shares"] = compute_time_shares(spans, timeline.begin, timeline.end)
            lanes = _describe_lanes(start.name, lane, spans, timeline.begin, timeline.end)
            process["lanes"] += lanes
    return sorted(shown.values(), key=lambda item: not item["process"].startswith(TRAINER_PROCESS))


def compute_time_shares(
    spans: Sequence[Span], from_time: float, to_time: float
) -> list[tuple[str, float]]:
    shares: dict[str, float] = dict.fromkeys((span.name for span in spans), 0.0)
    for span in spans:
        inside = min(span.end, to_time) - max(span.begin, from_time)
        shares[span.name] += max(0.0, inside) / (to_time - from_time)
    return sorted((item for item in shares.items() if item[1] > 0), key=lambda item: -item[1])


def _describe_lanes(
    process: str, lane: str, spans: Sequence[Span], from_time: float, to_time: float
) -> Iterator[JsonObject]:
    shown = [span for span in spans if span.end >= from_time and span.begin <= to_time]
    if is_lane_of_calls(process, lane):
        counts = average_spans_by_bin(shown, from_time, to_time)
        yield {"title": f"calls at {lane}", "most": max(counts, default=0), "counts": counts}
        return
    lanes = assign_lanes(shown)
    opened = max(lanes, default=-1) + 1
    for number in range(min(opened, MAX_LANES_PER_TRACK)):
        lane_spans = [span for span, index in zip(shown, lanes, strict=True) if index == number]
        title = "" if number else lane or "states"
        yield {"title": title, "slices": describe_slices(lane_spans, from_time, to_time)}
    if opened > MAX_LANES_PER_TRACK:
        yield {"title": f"and {opened - MAX_LANES_PER_TRACK} more at once", "slices": []}


def describe_slices(
    spans: Sequence[Span], from_time: float, to_time: float
) -> list[tuple[float, float, str, JsonObject]]:
    """Return begin, end (seconds from `from_time`), name and facts of spans without overlaps. Pure.

    Neighbors that are too short to be seen apart become one, whose facts have their number.
    """
    width_s = (to_time - from_time) / MAX_SLICES_ACROSS_WIDTH
    slices: list[tuple[float, float, str, JsonObject]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        first, last = span.begin - from_time, span.end - from_time
        if slices and last - slices[-1][0] < width_s:
            earlier = slices[-1]
            count = earlier[3].get("slices", 1) + 1
            name = earlier[2] if earlier[2] == span.name else "several"
            slices[-1] = (earlier[0], last, name, {"slices": count})
        else:
            slices.append((round(first, 5), round(last, 5), span.name, dict(span.facts)))
    return slices


def average_spans_by_bin(spans: Sequence[Span], from_time: float, to_time: float) -> list[float]:
    width_s = (to_time - from_time) / BIN_COUNT
    sums = [0.0] * BIN_COUNT
    before, count = from_time, 0
    for time, later in [*iterate_counts_under_way(spans), (to_time, 0)]:
        time = min(max(time, from_time), to_time)
        first, last = int((before - from_time) / width_s), int((time - from_time) / width_s)
        for index in range(first, min(last, BIN_COUNT - 1) + 1) if count else ():
            low, high = from_time + index * width_s, from_time + (index + 1) * width_s
            sums[index] += count * max(0.0, min(high, time) - max(low, before))
        before, count = time, later
    return [round(total / width_s, 2) for total in sums]


def list_longest_spans(timeline: Timeline) -> list[JsonObject]:
    pairs = [(start, span) for start in timeline.processes for span in start.spans if span.lane]
    pairs.sort(key=lambda item: item[1].begin - item[1].end)
    return [
        {
            "name": span.name,
            "process": start.name,
            "lane": span.lane,
            "seconds": span.end - span.begin,
            "begin": span.begin,
            "end": span.end,
            "facts": span.facts,
        }
        for start, span in pairs[:MAX_LONGEST_SLICES]
    ]


@lru_cache(maxsize=16)
def _explain_slow_run_once(paths: RunPaths, _metrics_bytes: int) -> JsonObject:
    try:
        return describe_answer(explain_slow_run(paths))
    except ArealError as error:
        return {"headline": f"cannot be explained: {error}", "findings": [], "hints": []}
