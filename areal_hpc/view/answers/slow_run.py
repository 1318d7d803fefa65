"""Analysis of the time of a run's steps, and of what is slow (`areal-hpc why RUN --slow`)."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from areal_hpc.errors import ShardError
from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.metrics.step_metrics import read_metrics, select_paced_rows, sum_times_by_activity
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import get_recipe_value, read_run_recipe
from areal_hpc.rundir.telemetry.events import read_recent_events
from areal_hpc.view.batch_episodes import (
    WAIT_PARTS,
    WITHOUT_TOOL,
    BatchEpisode,
    list_times_between_calls,
    read_batch_episodes,
    read_first_rows,
    sum_batch_waits,
)
from areal_hpc.view.formatting import (
    Answer,
    Finding,
    build_page_url_fragment,
    format_step_range,
    format_table,
    list_numbers,
)
from areal_hpc.view.logs import list_log_files

MAX_READ_STEPS = 10
MAX_READ_ROWS = 400
MIN_SHOWN_SHARE = 0.05
MIN_HINT_SHARE = 0.2
MAX_HINTS = 2
MIN_LAST_EPISODES_WAIT_SHARE = 0.3
MIN_LAST_TO_MEDIAN_DURATION = 2.0
MIN_USUAL_CALLS_AT_ONCE = 4.0
MIN_CALLS_OR_UPDATES = 4
SLOW_REPLICA_SPEED_RATIO = 0.6
MIN_SLOW_UPDATE_TIME_RATIO = 1.5
MIN_SLOW_UPDATE_EXCESS_S = 0.05
_STORAGE_IS_SLOW = "the run directory's storage is slow"
_FASTER_STORAGE = "put cluster.fileroot on faster storage"

ReplicaKey = tuple[str, int]
"""Name of a cell and number of a replica in it."""


class ReplicaOutlier(NamedTuple):
    cell: str
    replica: int
    value: float
    others: float
    """Median of the other replicas."""


class _Verdict(NamedTuple):
    text: str
    cause: str = ""
    hint: str = ""
    page: str = ""


_VERDICT_BY_PART = {
    "sealing": _Verdict(
        "all episodes of the batch had ended, their rows were sealed",
        _STORAGE_IS_SLOW,
        _FASTER_STORAGE,
    ),
    "reading batches": _Verdict(
        "shards are read from the storage of the run directory", _STORAGE_IS_SLOW, _FASTER_STORAGE
    ),
    "small files": _Verdict(
        "metrics are written to the run directory, notes read there",
        _STORAGE_IS_SLOW,
        _FASTER_STORAGE,
    ),
    "waiting for a replica": _Verdict(
        "no replica served the weights",
        hint="areal-hpc why RUN and areal-hpc logs RUN show what happened to the cells",
    ),
}
"""Verdicts on parts that have the same explanation in every run."""
_STORAGE_PARTS = ("sealing", "reading batches", "small files", "checkpoints")


def explain_slow_run(paths: RunPaths) -> Answer:
    rows = select_paced_rows(read_metrics(paths.metrics))
    return (
        _SlowRun(paths, rows).answer() if rows else Answer("no step with its times is recorded yet")
    )


def measure_mean_step_parts(
    rows: Sequence[MetricRow], waits: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of each part of the mean step, the largest first."""
    times = [sum_times_by_activity(row) for row in rows]
    parts = {activity: statistics.fmean(row[activity] for row in times) for activity in times[0]}
    waiting = parts.pop("waiting for episodes")
    if (waited := sum(waits[name] for name in WAIT_PARTS)) > 0:
        parts |= {name: waits[name] * waiting / waited for name in WAIT_PARTS}
    else:
        tools = statistics.fmean(list_numbers(rows, "episode/tool_time_fraction") or [0.0])
        parts |= {"generation": waiting * (1 - tools), "tools": waiting * tools}
    rest = statistics.fmean(list_numbers(rows, "time/step_s")) - sum(parts.values())
    parts["the trainer's other work"] = rest
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return {name: seconds for name, seconds in ranked if seconds > 0} or {"nothing recorded": 0.0}


def measure_call_speeds(episodes: Iterable[BatchEpisode]) -> dict[ReplicaKey, float]:
    """Return the sampled tokens per second of model calls, for each replica."""
    calls = defaultdict(list)
    for episode in episodes:
        for call in episode.timed_calls:
            took_s = call.answered_at - call.asked_at
            calls[episode.record.cell, call.replica].append((call.reply_tokens, took_s))
    sums = {key: [sum(column) for column in zip(*calls[key], strict=True)] for key in sorted(calls)}
    return {
        key: tokens / seconds
        for key, (tokens, seconds) in sums.items()
        if len(calls[key]) >= MIN_CALLS_OR_UPDATES and seconds > 0
    }


def measure_update_times(events: Iterable[Mapping[str, Any]]) -> dict[ReplicaKey, float]:
    """Return the median seconds of a weight update, as each replica measured them."""
    times_s: dict[ReplicaKey, list[float]] = defaultdict(list)
    for row in events:
        if row.get("event") == "replica_resumed" and isinstance(row.get("busy_s"), int | float):
            times_s[str(row.get("role")), int(row.get("replica") or 0)].append(row["busy_s"])
    return {
        key: statistics.median(times)
        for key, times in sorted(times_s.items())
        if len(times) >= MIN_CALLS_OR_UPDATES
    }


def _find_outlier(
    values: Mapping[ReplicaKey, float],
    pick: Callable[..., ReplicaKey],
    stands_out: Callable[[float, float], bool],
) -> ReplicaOutlier | None:
    if len(values) < 2:
        return None
    worst = pick(values, key=lambda key: values[key])
    others = statistics.median(value for key, value in values.items() if key != worst)
    is_outlier = stands_out(values[worst], others)
    return ReplicaOutlier(*worst, values[worst], others) if is_outlier else None


class _SlowRun:
    def __init__(self, paths: RunPaths, rows: Sequence[MetricRow]) -> None:
        self._paths, self._run, self._rows = paths, paths.run_name, rows
        self._recipe, events = read_run_recipe(paths.recipe), read_recent_events(paths.events)
        self._problems: list[str] = []
        steps = [row["step"] for row in rows[-MAX_READ_STEPS:]]
        self._episodes = read_batch_episodes(paths, steps, self._problems)
        self._timed = [episode for episode in self._episodes if episode.is_timed]
        self._nodes = self._map_cells_to_nodes()
        self._step_s = self._compute_mean("time/step_s")
        self._waits = sum_batch_waits(rows, self._episodes)
        self._call_speeds = measure_call_speeds(self._episodes)
        self._update_times = measure_update_times(events)
        self._slow_replica = _find_outlier(
            self._call_speeds, min, lambda own, others: own < SLOW_REPLICA_SPEED_RATIO * others
        )
        self._slow_receiver = _find_outlier(
            self._update_times,
            max,
            lambda own, others: (
                own > max(MIN_SLOW_UPDATE_TIME_RATIO * others, others + MIN_SLOW_UPDATE_EXCESS_S)
            ),
        )
        self._late_episode = self._find_longest_awaited_episode()

    def answer(self) -> Answer:
        step_s, parts = self._step_s, measure_mean_step_parts(self._rows, self._waits)
        verdicts = {
            name: self._explain_part(name, seconds)
            for name, seconds in parts.items()
            if seconds >= MIN_SHOWN_SHARE * step_s
        }
        cause = next((verdict.cause for verdict in verdicts.values()), "")
        shares = ", ".join(
            f"{seconds / step_s:.0%} {name}"
            for name, seconds in parts.items()
            if seconds >= 0.01 * step_s
        )
        largest = next(iter(parts))
        headline = (
            f"the run is limited by {largest}: {parts[largest]:.1f} s of the {step_s:.1f} s of a "
            f"step ({format_step_range(self._rows)})"
        )
        hints = [
            verdict.hint
            for name, verdict in verdicts.items()
            if verdict.hint and parts[name] >= MIN_HINT_SHARE * step_s
        ]
        return Answer(
            f"{headline}; {cause}" if cause else headline,
            (
                Finding(shares, self._link("metrics", text="time/")),
                *(Finding(verdict.text, verdict.page) for verdict in verdicts.values()),
                *self._describe_storage(parts),
                *self._describe_outliers(cause),
                *(Finding(f"not read: {problem}") for problem in self._problems[:3]),
            ),
            tuple(hints[:MAX_HINTS]),
            tuple(self._format_replica_table()),
        )

    def _explain_part(self, name: str, seconds: float) -> _Verdict:
        share = f"{name}: {seconds:.2f} s a step ({seconds / self._step_s:.0%})"
        match name:
            case "generation":
                return self._explain_generation(f"{share}: model calls of the batch were under way")
            case "tools":
                return self._explain_tools(
                    f"{share}: episodes of the batch were outside of model calls"
                )
            case "admission":
                keys = self._format_keys(
                    "rollout.max_concurrent_rollouts", "rollout.max_head_offpolicyness"
                )
                text = f"{share}: no episode of the awaited batch was under way"
                explanation = (f"the bounds are {keys}", f"raise {keys}") if keys else ()
                return _Verdict(text, *explanation)
            case "weight updates":
                return self._explain_weight_updates(share)
            case "evaluation":
                times, keys = self._list_times("eval"), self._format_keys("evaluation.every_steps")
                text = f"{share}: {len(times)} of {len(self._rows)} steps were evaluated, "
                text += f"{statistics.fmean(times):.1f} s each"
                hint = f"evaluation.separate_cell=true, fewer tasks, or a larger {keys}"
                return _Verdict(text, keys, hint, self._link("metrics", text="eval"))
            case "checkpoints":
                if times := self._list_times("checkpoint"):
                    share += f": {len(times)} checkpoints of {statistics.fmean(times):.1f} s"
                keys = self._format_keys("trainer.checkpoint_every_steps")
                hint = f"a larger {keys}, or faster storage for cluster.fileroot"
                return _Verdict(share, "writing of checkpoints keeps the ranks waiting", hint)
            case "training":
                train_s = self._compute_mean("time/train_s")
                text = f"{share}, of which {train_s:.2f} s are passes of the model"
                if (score_s := self._compute_mean("time/score_s")) > 0:
                    text += f" and {score_s:.2f} s those of a reference, a teacher or a critic"
                return _Verdict(text, hint="give the trainer more ranks")
        if (verdict := _VERDICT_BY_PART.get(name)) is not None:
            return verdict._replace(text=f"{share}: {verdict.text}")
        return _Verdict(share)

    def _explain_generation(self, text: str) -> _Verdict:
        slow, late = self._slow_replica, self._late_episode
        if slow is not None and (late is None or late.record.cell == slow.cell):
            name = self._name_replica(slow)
            hint = f"look at {name}; exclude its node if it lasts"
            return _Verdict(text, f"{name} is slow", hint)
        if late is not None:
            cause = self._describe_late_episode(late)
            hint = "bound episodes (rollout.episode_timeout_s, rollout.sampling.max_new_tokens), or"
            hint += " rollout.extra_samples, with which the last ones need not be awaited"
            return _Verdict(f"{text}; {cause}", cause, hint, self._link_episode(late))
        replicas = {
            (episode.record.cell, call.replica)
            for episode in self._timed
            for call in episode.timed_calls
        }
        if replicas and self._waits["any call"]:
            calls = self._waits["calls"] / self._waits["any call"] / len(replicas)
            text += f"; {calls:.1f} at once at each replica on average"
            if calls < MIN_USUAL_CALLS_AT_ONCE:
                keys = self._format_keys(
                    "trainer.batch_size", "rollout.n_samples",
                    "rollout.max_concurrent_rollouts", "rollout.max_head_offpolicyness",
                )  # fmt: skip
                cause = f"{calls:.1f} calls at once at each replica are few"
                return _Verdict(text, cause, f"fewer cells, or more episodes at once ({keys})")
        hint = "more cells, shorter replies, or rollout.max_head_offpolicyness of 1 or more"
        return _Verdict(text, hint=hint)

    def _explain_tools(self, text: str) -> _Verdict:
        times = self._group_times_outside_calls()
        if not times:
            return _Verdict(text)
        summary = ", ".join(
            f"{name} {statistics.fmean(seconds):.2f} s "
            f"({len(seconds)} times, at most {max(seconds):.2f} s)"
            for name, seconds in times[:3]
        )
        name, seconds = times[0]
        cause = f"{name} takes {statistics.fmean(seconds):.2f} s on average"
        page = self._link("trajectories", sort="seconds")
        if (late := self._late_episode) is not None:
            cause += f"; {self._describe_late_episode(late)}"
            page = self._link_episode(late)
        return _Verdict(f"{text}: {summary}", cause, f"make {name} faster", page)

    def _group_times_outside_calls(self) -> list[tuple[str, list[float]]]:
        """Return the seconds of episodes outside of model calls by activity, the largest first."""
        spent: dict[str, list[float]] = defaultdict(list)
        multi_call = [episode for episode in self._episodes if len(episode.record.calls) > 1]
        try:
            for row in read_first_rows(self._paths, multi_call[-MAX_READ_ROWS:]):
                for tool, seconds in list_times_between_calls(row):
                    spent[
                        "the agent between calls" if tool == WITHOUT_TOOL else f"the tool {tool}"
                    ].append(seconds)
        except ShardError as error:
            self._problems.append(str(error))
        for episode in self._timed:
            if calls := episode.timed_calls:
                spent["before the first call"].append(calls[0].asked_at - episode.record.started_at)
                last = max(call.answered_at for call in calls)
                spent["after the last reply (rewards)"].append(episode.record.ended_at - last)
        return sorted(
            ((name, times) for name, times in spent.items() if sum(times) > 0),
            key=lambda item: -sum(item[1]),
        )

    def _explain_weight_updates(self, text: str) -> _Verdict:
        names = {name for row in self._rows for name in row if name.startswith("weights/")}
        # `generation_pause` is the same time, measured by the replicas.
        phases = {
            name: self._compute_mean(name)
            for name in sorted(names)
            if name.endswith("_s") and not name.startswith("weights/gen")
        }
        cause, hint = "", "see docs/weights.md"
        if phases:
            longest = max(phases, key=lambda name: phases[name])
            text += f": the longest part is {longest}, {phases[longest]:.2f} s"
        if (slow := self._slow_receiver) is not None:
            cause = self._describe_slow_receiver(slow)
            hint = f"look at the network of {self._name_replica(slow)}"
        return _Verdict(text, cause, hint, self._link("metrics", text="weights/"))

    def _describe_storage(self, parts: Mapping[str, float]) -> Iterator[Finding]:
        waiting = [name for name in parts if name in _STORAGE_PARTS]
        seconds = sum(parts[name] for name in waiting)
        if len(waiting) > 1 and seconds >= MIN_HINT_SHARE * self._step_s:
            yield Finding(
                f"{', '.join(waiting)} wait for the run directory's storage: together "
                f"{seconds:.2f} s a step ({seconds / self._step_s:.0%})"
            )

    def _describe_outliers(self, explained_cause: str) -> Iterator[Finding]:
        """Yield slow replicas, except one that `explained_cause` names already."""
        if (slow := self._slow_replica) is not None:
            text = (
                f"{self._name_replica(slow)} generates {slow.value:.0f} tokens a second "
                f"in a call, the others {slow.others:.0f}"
            )
            where = f'cell="{slow.cell}"'
            yield Finding(text, self._link("trajectories", where=where, sort="seconds"))
        receiver = self._slow_receiver
        if receiver is not None and self._name_replica(receiver) not in explained_cause:
            page = self._link("metrics", text="weights/")
            yield Finding(self._describe_slow_receiver(receiver), page)

    def _find_longest_awaited_episode(self) -> BatchEpisode | None:
        if self._late_share < MIN_LAST_EPISODES_WAIT_SHARE:
            return None
        longest = max(self._timed, key=lambda episode: episode.record.duration_s)
        least_s = MIN_LAST_TO_MEDIAN_DURATION * self._compute_median_duration_s()
        return longest if longest.record.duration_s >= least_s else None

    @property
    def _late_share(self) -> float:
        waited = sum(self._waits[name] for name in WAIT_PARTS)
        return self._waits["last episodes"] / waited if waited else 0.0

    def _describe_late_episode(self, late_episode: BatchEpisode) -> str:
        record = late_episode.record
        cell = self._name_cell(record.cell)
        return (
            f"the last episodes of batches were awaited for {self._late_share:.0%} of the waits: "
            f"{late_episode.title}{f' on {cell}' if cell else ''} took "
            f"{record.duration_s:.1f} s, where {self._compute_median_duration_s():.1f} s is usual"
        )

    def _describe_slow_receiver(self, slow: ReplicaOutlier) -> str:
        return (
            f"{self._name_replica(slow)} takes {slow.value:.2f} s for an update, "
            f"the others {slow.others:.2f} s"
        )

    def _format_replica_table(self) -> list[str]:
        """Return a table of all replicas; empty unless there are several."""
        keys = sorted(self._call_speeds.keys() | self._update_times.keys())
        rows = [("cell", "replica", "node", "tokens/s in a call", "s at an update")]
        for key in keys:
            cell, replica = key
            speed = f"{self._call_speeds[key]:.0f}" if key in self._call_speeds else "-"
            update_s = f"{self._update_times[key]:.2f}" if key in self._update_times else "-"
            rows.append((cell, str(replica), self._nodes.get(cell, "-"), speed, update_s))
        return format_table(rows, right_aligned_columns=(1, 3, 4)) if len(keys) > 1 else []

    def _map_cells_to_nodes(self) -> dict[str, str]:
        try:
            attempts = self._paths.list_attempts()
            files = list_log_files(self._paths, attempts[-1]) if attempts else []
        except OSError:
            return {}
        return {file.job_or_cell: file.node for file in files if file.node}

    def _format_keys(self, *keys: str) -> str:
        """Format the keys that the recipe sets with their values, as `a.b=1 and c.d=2`."""
        values = {key: get_recipe_value(self._recipe, key) for key in keys}
        return " and ".join(f"{key}={value}" for key, value in values.items() if value is not None)

    def _list_times(self, phase: str) -> list[float]:
        return [seconds for seconds in list_numbers(self._rows, f"time/{phase}_s") if seconds > 0]

    def _compute_mean(self, metric: str) -> float:
        return statistics.fmean(list_numbers(self._rows, metric) or [0.0])

    def _compute_median_duration_s(self) -> float:
        return statistics.median(episode.record.duration_s for episode in self._timed)

    def _link(self, page: str, **query: str) -> str:
        return build_page_url_fragment(page, self._run, **query)

    def _link_episode(self, episode: BatchEpisode) -> str:
        return self._link("trajectory", row=episode.first_row_name)

    def _name_replica(self, outlier: ReplicaOutlier) -> str:
        cell = self._name_cell(outlier.cell)
        return f"replica {outlier.replica} of {cell}" if outlier.replica >= 0 else cell

    def _name_cell(self, cell: str) -> str:
        node = self._nodes.get(cell)
        return f"{cell} (node {node})" if node else cell
