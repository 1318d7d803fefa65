"""Speeds of replicas, times of tools and of weight updates, and which of them stands out. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_hpc.view.batch_episodes import WITHOUT_TOOL, BatchEpisode

MIN_CALLS_OR_UPDATES = 4
SLOW_REPLICA_SPEED_RATIO = 0.6
MIN_SLOW_UPDATE_TIME_RATIO = 1.5
MIN_SLOW_UPDATE_EXCESS_S = 0.05

ReplicaKey = tuple[str, int]
"""A cell and the number of a replica in it."""


@dataclass(frozen=True, slots=True)
class ReplicaOutlier:
    cell: str
    replica: int
    value: float
    others: float
    """The median of the others."""


def measure_call_speeds(episodes: Iterable[BatchEpisode]) -> dict[ReplicaKey, float]:
    """Sampled tokens per second of model calls."""
    tokens: dict[ReplicaKey, list[int]] = defaultdict(list)
    seconds: dict[ReplicaKey, float] = defaultdict(float)
    for one in episodes:
        for call in one.timed_calls:
            key = one.record.cell, call.replica
            tokens[key].append(call.reply_tokens)
            seconds[key] += call.answered_at - call.asked_at
    return {
        key: sum(tokens[key]) / seconds[key]
        for key in sorted(tokens)
        if len(tokens[key]) >= MIN_CALLS_OR_UPDATES and seconds[key] > 0
    }


def measure_update_times(events: Iterable[Mapping[str, Any]]) -> dict[ReplicaKey, float]:
    """Median of the seconds that a replica itself took of an update of its weights."""
    found: dict[ReplicaKey, list[float]] = defaultdict(list)
    for row in events:
        if row.get("event") == "replica_resumed" and isinstance(row.get("busy_s"), int | float):
            found[str(row.get("role")), int(row.get("replica") or 0)].append(row["busy_s"])
    return {
        key: statistics.median(found[key])
        for key in sorted(found)
        if len(found[key]) >= MIN_CALLS_OR_UPDATES
    }


def find_slow_replica(speeds: Mapping[ReplicaKey, float]) -> ReplicaOutlier | None:
    return _find_outlier(
        min, speeds, lambda speed, others: speed < SLOW_REPLICA_SPEED_RATIO * others
    )


def find_slow_receiver(update_times: Mapping[ReplicaKey, float]) -> ReplicaOutlier | None:
    return _find_outlier(
        max,
        update_times,
        lambda took_s, others: (
            took_s > max(MIN_SLOW_UPDATE_TIME_RATIO * others, others + MIN_SLOW_UPDATE_EXCESS_S)
        ),
    )


def _find_outlier(
    pick: Callable[..., ReplicaKey],
    values: Mapping[ReplicaKey, float],
    stands_out: Callable[[float, float], bool],
) -> ReplicaOutlier | None:
    if len(values) < 2:
        return None
    worst = pick(values, key=lambda key: values[key])
    others = statistics.median(value for key, value in values.items() if key != worst)
    if not stands_out(values[worst], others):
        return None
    return ReplicaOutlier(*worst, values[worst], others)


@dataclass(frozen=True, slots=True)
class ActivityOutsideCalls:
    name: str
    total_s: float
    count: int
    longest_s: float

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count


def group_times_outside_calls(
    episodes: Sequence[BatchEpisode], times_between_calls: Iterable[tuple[str, float]]
) -> list[ActivityOutsideCalls]:
    """What episodes do outside of model calls, what took most first.

    `times_between_calls` are the times between calls, by the tool that was called.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for tool, seconds in times_between_calls:
        name = "the agent between calls" if tool == WITHOUT_TOOL else f"the tool {tool}"
        found[name].append(seconds)
    for one in episodes:
        if one.is_timed and (calls := one.timed_calls):
            found["before the first call"].append(calls[0].asked_at - one.record.started_at)
            last = max(call.answered_at for call in calls)
            found["after the last reply (rewards)"].append(one.record.ended_at - last)
    kinds = [
        ActivityOutsideCalls(name, sum(times), len(times), max(times))
        for name, times in found.items()
        if sum(times) > 0
    ]
    return sorted(kinds, key=lambda kind: -kind.total_s)
