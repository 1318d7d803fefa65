"""Speeds of replicas, times of tools and of weight updates, and which of them stands out. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_hpc.view.batch_episodes import WITHOUT_TOOL, BatchEpisode

MIN_CALLS_OR_UPDATES = 4
SLOW_REPLICA_SPEED_RATIO = 0.6
MIN_SLOW_UPDATE_TIME_RATIO = 1.5
MIN_SLOW_UPDATE_EXCESS_S = 0.05


@dataclass(frozen=True, slots=True)
class ReplicaOutlier:
    cell_and_replica: tuple[str, int]
    value: float
    others: float
    """The median of the others."""


def measure_call_tokens_per_s_by_replica(
    episodes: Iterable[BatchEpisode],
) -> dict[tuple[str, int], float]:
    tokens: dict[tuple[str, int], int] = defaultdict(int)
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for one in episodes:
        for call in one.timed_calls:
            key = one.record.cell, call.replica
            tokens[key] += call.reply_tokens
            seconds[key] += call.answered_at - call.asked_at
            counts[key] += 1
    return {
        key: tokens[key] / seconds[key]
        for key in sorted(tokens)
        if counts[key] >= MIN_CALLS_OR_UPDATES and seconds[key] > 0
    }


def find_slow_replica(speeds: Mapping[tuple[str, int], float]) -> ReplicaOutlier | None:
    if len(speeds) < 2:
        return None
    name = min(speeds, key=lambda key: speeds[key])
    others = statistics.median(value for key, value in speeds.items() if key != name)
    return (
        ReplicaOutlier(name, speeds[name], others)
        if speeds[name] < SLOW_REPLICA_SPEED_RATIO * others
        else None
    )


def measure_median_update_s_by_replica(
    events: Iterable[Mapping[str, Any]],
) -> dict[tuple[str, int], float]:
    """Median of the seconds that a replica itself took of an update, by cell and replica.

    Of runs of earlier versions it is that of the pause, in which it also waited for the others.
    """
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in events:
        took_s, replica = row.get("busy_s", row.get("pause_s")), row.get("replica")
        if row.get("event") == "replica_resumed" and isinstance(took_s, int | float):
            found[str(row.get("role")), replica if isinstance(replica, int) else 0].append(took_s)
    return {
        key: statistics.median(found[key])
        for key in sorted(found)
        if len(found[key]) >= MIN_CALLS_OR_UPDATES
    }


def find_replica_slow_at_updates(times: Mapping[tuple[str, int], float]) -> ReplicaOutlier | None:
    if len(times) < 2:
        return None
    name = max(times, key=lambda key: times[key])
    others = statistics.median(value for key, value in times.items() if key != name)
    is_slow = times[name] > max(
        MIN_SLOW_UPDATE_TIME_RATIO * others, others + MIN_SLOW_UPDATE_EXCESS_S
    )
    return ReplicaOutlier(name, times[name], others) if is_slow else None


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
