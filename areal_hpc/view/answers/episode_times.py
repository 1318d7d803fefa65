"""Time of steps by what episodes did meanwhile, and speeds of replicas and tools. Pure."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.metrics.step_metrics import sum_times_by_activity
from areal_hpc.view.batch_episodes import WITHOUT_TOOL, BatchEpisode
from areal_hpc.view.metric_values import list_numbers

MAX_LAST_EPISODES_SHARE = 0.05
MIN_CALLS_OR_UPDATES = 4
SLOW_REPLICA_SPEED_RATIO = 0.6
MIN_SLOW_UPDATE_TIME_RATIO = 1.5
MIN_SLOW_UPDATE_EXCESS_S = 0.05

ReplicaKey = tuple[str, int]
"""A cell and the number of a replica in it."""


@dataclass(slots=True)
class WaitSplit:
    """Seconds of waits, by what the episodes of the awaited batches were doing."""

    generation_s: float = 0.0
    """Episodes were in model calls. A moment counts for as much as the share of those that were."""
    outside_calls_s: float = 0.0
    """Episodes were between, before or after their calls: tools, rewards, the agent's own code."""
    no_episode_s: float = 0.0
    """No episode of the batch was under way, and some were still to begin."""
    sealing_s: float = 0.0
    """All of its episodes had ended: they were sealed and settled."""
    last_episodes_s: float = 0.0
    """Only the last episodes were: one, or `MAX_LAST_EPISODES_SHARE` of them."""
    summed_call_s: float = 0.0
    """Sum over model calls of the time in which they were under way..."""
    any_call_s: float = 0.0
    """...and the time in which any was."""
    only_active_cell_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By cell: only episodes of this one were under way."""

    @property
    def total_s(self) -> float:
        return self.generation_s + self.outside_calls_s + self.no_episode_s + self.sealing_s

    def add_wait(self, from_time: float, to_time: float, episodes: Sequence[BatchEpisode]) -> None:
        """Count a wait between two Unix times for the batch of these episodes."""
        most_last = max(1, int(MAX_LAST_EPISODES_SHARE * len(episodes)))
        active: dict[str, Counter[str]] = {
            activity: Counter() for activity in ("episode", "in calls", "call")
        }
        now = from_time
        for at, activity, cell, change in sorted(_list_changes(episodes), key=lambda one: one[0]):
            until = min(max(at, from_time), to_time)
            if until > now:
                self._add_seconds(until - now, active, most_last)
                now = until
            active[activity][cell] += change
        # After the last change no episode is under way, nor will be.
        self.sealing_s += max(0.0, to_time - now)

    def _add_seconds(
        self, seconds: float, active: Mapping[str, Counter[str]], most_last: int
    ) -> None:
        calls, episodes = active["call"].total(), active["episode"].total()
        self.summed_call_s += seconds * calls
        self.any_call_s += seconds * (calls > 0)
        if not episodes:
            self.no_episode_s += seconds
            return
        # A call may end a moment after the agent closed its session: it counts as if it had not.
        calling = min(1.0, active["in calls"].total() / episodes)
        self.generation_s += seconds * calling
        self.outside_calls_s += seconds * (1.0 - calling)
        if episodes <= most_last:
            self.last_episodes_s += seconds
        cells = [cell for cell, count in active["episode"].items() if count > 0]
        if len(cells) == 1:
            self.only_active_cell_s[cells[0]] += seconds


def _list_changes(episodes: Sequence[BatchEpisode]) -> Iterator[tuple[float, str, str, int]]:
    """When what began (1) or ended (-1) in which cell."""
    for one in episodes:
        if not one.is_timed:
            continue
        spans_by_activity = {
            "episode": [(one.record.started_at, one.record.ended_at)],
            "in calls": one.merged_call_spans,
            "call": [(call.asked_at, call.answered_at) for call in one.timed_calls],
        }
        for activity, spans in spans_by_activity.items():
            for begin, end in spans:
                yield begin, activity, one.record.cell, 1
                yield end, activity, one.record.cell, -1


@dataclass(frozen=True, slots=True)
class StepPart:
    name: str
    seconds: float


def sum_batch_wait_splits(
    rows: Sequence[MetricRow], episodes: Sequence[BatchEpisode]
) -> WaitSplit | None:
    """What episodes did while the trainer waited for their batches; None if it is not known.

    The row's end and length tell when a step began. The wait follows the writing of the row before,
    which is nearly all of the time for small files.
    """
    split = WaitSplit()
    for row in rows:
        own = [one for one in episodes if one.step == row["step"] and one.is_timed]
        ended_at, step_s, wait_s = (
            row.get(name) for name in ("unix_time_s", "time/step_s", "time/batch_wait_s")
        )
        if own and ended_at and step_s and wait_s:
            begin = ended_at - step_s + (row.get("time/files_s") or 0.0)
            split.add_wait(begin, begin + wait_s, own)
    return split if split.total_s > 0 else None


def list_mean_step_parts(rows: Sequence[MetricRow], wait_split: WaitSplit | None) -> list[StepPart]:
    """Parts of the mean step, the largest first."""
    times = [sum_times_by_activity(row) for row in rows]
    parts = {activity: statistics.fmean(one[activity] for one in times) for activity in times[0]}
    waiting = parts.pop("waiting for episodes")
    if wait_split is not None:
        share = waiting / wait_split.total_s
        parts |= {
            "generation": wait_split.generation_s * share,
            "tools": wait_split.outside_calls_s * share,
            "admission": wait_split.no_episode_s * share,
            "sealing": wait_split.sealing_s * share,
        }
    else:
        tools = statistics.fmean(list_numbers(rows, "episode/tool_time_fraction") or [0.0])
        parts |= {"generation": waiting * (1 - tools), "tools": waiting * tools}
    rest = statistics.fmean(list_numbers(rows, "time/step_s")) - sum(parts.values())
    parts["the trainer's other work"] = max(0.0, rest)
    found = [StepPart(name, seconds) for name, seconds in parts.items() if seconds > 0]
    return sorted(found, key=lambda part: -part.seconds) or [StepPart("nothing recorded", 0.0)]


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
