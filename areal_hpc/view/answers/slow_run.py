"""What the time of a run's steps goes to, and who is to blame (`areal-hpc why RUN --slow`)."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_hpc.errors import ShardError
from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.metrics.step_metrics import CELL_IDLE_S_METRIC, read_metrics, select_paced_rows
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import get_recipe_value, read_run_recipe
from areal_hpc.rundir.telemetry.events import read_recent_events
from areal_hpc.view.answers.answer import Answer, Finding, build_page_url_fragment
from areal_hpc.view.answers.episode_times import (
    ReplicaOutlier,
    StepPart,
    find_slow_receiver,
    find_slow_replica,
    group_times_outside_calls,
    list_mean_step_parts,
    measure_call_speeds,
    measure_update_times,
    sum_batch_wait_splits,
)
from areal_hpc.view.batch_episodes import (
    BatchEpisode,
    list_times_between_calls,
    read_batch_episodes,
    read_first_row_of_each_episode,
)
from areal_hpc.view.logs import list_log_files
from areal_hpc.view.metric_values import format_step_range, get_number, list_numbers
from areal_hpc.view.tables import format_table

MAX_READ_STEPS = 10
MAX_READ_ROWS = 400
MIN_SHOWN_SHARE = 0.05
MIN_HINT_SHARE = 0.2
MAX_HINTS = 2
MIN_LAST_EPISODES_WAIT_SHARE = 0.3
MIN_LAST_TO_MEDIAN_DURATION = 2.0
MIN_IDLE_SHARE = 0.25
MIN_USUAL_CALLS_AT_ONCE = 4.0
STORAGE_PARTS = {
    "sealing": "all episodes of the batch had ended, their rows were sealed",
    "reading batches": "shards are read from the storage of the run directory",
    "small files": "metrics are written to the run directory, notes read there",
}


def explain_slow_run(paths: RunPaths) -> Answer:
    rows = select_paced_rows(read_metrics(paths.metrics))
    return (
        _SlowRun(paths, rows).answer() if rows else Answer("no step with its times is recorded yet")
    )


@dataclass(frozen=True, slots=True)
class _Verdict:
    text: str
    cause: str = ""
    hint: str = ""
    page: str = ""


class _SlowRun:
    def __init__(self, paths: RunPaths, rows: Sequence[MetricRow]) -> None:
        self._paths, self._run, self._rows = paths, paths.run_name, rows
        self._recipe, events = read_run_recipe(paths.recipe), read_recent_events(paths.events)
        self._problems: list[str] = []
        steps = [row["step"] for row in rows[-MAX_READ_STEPS:]]
        self._episodes = read_batch_episodes(paths, steps, self._problems)
        self._timed = [one for one in self._episodes if one.is_timed]
        self._nodes = self._map_cells_to_nodes()
        self._starts = Counter(
            (str(row.get("role")), row.get("replica"))
            for row in events
            if row.get("event") == "replica_started"
        )
        self._step_s = self._compute_mean("time/step_s")
        self._split = sum_batch_wait_splits(rows, self._episodes)
        self._call_speeds = measure_call_speeds(self._episodes)
        self._update_times = measure_update_times(events)
        self._slow_replica = find_slow_replica(self._call_speeds)
        self._slow_receiver = find_slow_receiver(self._update_times)
        self._late_episode = self._find_longest_awaited_episode()

    def answer(self) -> Answer:
        step_s, parts = self._step_s, list_mean_step_parts(self._rows, self._split)
        shown = [part for part in parts if part.seconds >= MIN_SHOWN_SHARE * step_s]
        verdicts = [self._explain_part(part) for part in shown]
        cause = verdicts[0].cause if verdicts else ""
        shares = ", ".join(
            f"{part.seconds / step_s:.0%} {part.name}"
            for part in parts
            if part.seconds >= 0.01 * step_s
        )
        findings = [
            Finding(shares, self._link("metrics", text="time/")),
            *(Finding(one.text, one.page) for one in verdicts),
            *self._describe_storage(parts),
            *self._describe_outliers(cause),
            *(Finding(f"not read: {one}") for one in self._problems[:3]),
        ]
        first = f"{parts[0].seconds:.1f} s of the {step_s:.1f} s of a step"
        headline = (
            f"the run is limited by {parts[0].name}: {first} ({format_step_range(self._rows)})"
        )
        hints = [
            verdict.hint
            for part, verdict in zip(shown, verdicts, strict=True)
            if verdict.hint and part.seconds >= MIN_HINT_SHARE * step_s
        ]
        return Answer(
            f"{headline}; {cause}" if cause else headline,
            tuple(findings),
            tuple(hints[:MAX_HINTS]),
            tuple(self._format_replica_table()),
        )

    def _explain_part(self, part: StepPart) -> _Verdict:
        share = f"{part.name}: {part.seconds:.2f} s a step ({part.seconds / self._step_s:.0%})"
        match part.name:
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
                if (idle := self._measure_cell_idle_share()) is not None:
                    text += f"; cells had no ticket for {idle:.0%} of their time"
                return (
                    _Verdict(text, f"the bounds are {keys}", f"raise {keys}")
                    if keys
                    else _Verdict(text)
                )
            case "weight updates":
                return self._explain_weight_updates(share)
            case "evaluation":
                times, keys = self._list_times("eval"), self._format_keys("evaluation.every_steps")
                text = f"{share}: {len(times)} of {len(self._rows)} steps were evaluated, "
                hint = f"evaluation.separate_cell=true, fewer tasks, or a larger {keys}"
                text += f"{statistics.fmean(times):.1f} s each"
                return _Verdict(text, keys, hint, self._link("metrics", text="eval"))
            case "checkpoints":
                if times := self._list_times("checkpoint"):
                    share += f": {len(times)} checkpoints of {statistics.fmean(times):.1f} s"
                keys = self._format_keys("trainer.checkpoint_every_steps")
                hint = f"a larger {keys}, or faster storage for cluster.fileroot"
                return _Verdict(share, "writing of checkpoints keeps the ranks waiting", hint)
            case name if name in STORAGE_PARTS:
                cause = "the run directory's storage is slow"
                hint = "put cluster.fileroot on faster storage"
                return _Verdict(f"{share}: {STORAGE_PARTS[name]}", cause, hint)
            case "training":
                train_s = self._compute_mean("time/train_s")
                text = f"{share}, of which {train_s:.2f} s are passes of the model"
                if (score_s := self._compute_mean("time/score_s")) > 0:
                    text += f" and {score_s:.2f} s those of a reference, a teacher or a critic"
                return _Verdict(text, hint="give the trainer more ranks")
            case "waiting for a replica":
                hint = "areal-hpc why RUN and areal-hpc logs RUN say what became of the cells"
                return _Verdict(f"{share}: no replica served the weights", hint=hint)
        return _Verdict(share)

    def _explain_generation(self, text: str) -> _Verdict:
        slow, late = self._slow_replica, self._late_episode
        if slow is not None and (late is None or late.record.cell == slow.cell):
            hint = f"look at {self._name_replica(slow)}; exclude its node if it lasts"
            return _Verdict(text, f"{self._name_replica(slow)} is slow", hint)
        if late is not None:
            cause = self._describe_late_episode(late)
            hint = "bound episodes (rollout.episode_timeout_s, rollout.sampling.max_new_tokens), or"
            hint += " rollout.extra_samples, with which the last ones need not be awaited"
            return _Verdict(f"{text}; {cause}", cause, hint, self._link_episode(late))
        replicas = {
            (one.record.cell, call.replica) for one in self._timed for call in one.timed_calls
        }
        if self._split is not None and replicas and self._split.any_call_s:
            calls = self._split.summed_call_s / self._split.any_call_s / len(replicas)
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
        kinds = group_times_outside_calls(self._episodes, self._read_times_between_calls())
        if not kinds:
            return _Verdict(text)
        told = ", ".join(
            f"{kind.name} {kind.mean_s:.2f} s ({kind.count} times, at most {kind.longest_s:.2f} s)"
            for kind in kinds[:3]
        )
        cause = f"{kinds[0].name} takes {kinds[0].mean_s:.2f} s on average"
        page = self._link("trajectories", sort="seconds")
        if (late := self._late_episode) is not None:
            cause += f"; {self._describe_late_episode(late)}"
            page = self._link_episode(late)
        return _Verdict(f"{text}: {told}", cause, f"make {kinds[0].name} faster", page)

    def _explain_weight_updates(self, text: str) -> _Verdict:
        names = {name for row in self._rows for name in row if name.startswith("weights/")}
        # `generation_pause` is what replicas saw of the same time.
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

    def _describe_storage(self, parts: Sequence[StepPart]) -> Iterator[Finding]:
        waiting = [part for part in parts if part.name in (*STORAGE_PARTS, "checkpoints")]
        seconds = sum(part.seconds for part in waiting)
        if len(waiting) > 1 and seconds >= MIN_HINT_SHARE * self._step_s:
            names = ", ".join(part.name for part in waiting)
            yield Finding(
                f"{names} wait for the run directory's storage: together {seconds:.2f} s a step "
                f"({seconds / self._step_s:.0%})"
            )

    def _describe_outliers(self, explained_cause: str) -> Iterator[Finding]:
        """Slow replicas and idle cells, but for what `explained_cause` says already."""
        if (slow := self._slow_replica) is not None:
            text = (
                f"{self._name_replica(slow)} generates {slow.value:.0f} tokens a second "
                f"in a call, the others {slow.others:.0f}"
            )
            split = self._split
            if split is not None and (alone_s := split.only_active_cell_s.get(slow.cell, 0.0)) > 0:
                text += f"; for {alone_s / split.total_s:.0%} of the waits only its cell worked"
            where = f'cell="{slow.cell}"'
            yield Finding(text, self._link("trajectories", where=where, sort="seconds"))
        receiver = self._slow_receiver
        if receiver is not None and self._name_replica(receiver) not in explained_cause:
            page = self._link("metrics", text="weights/")
            yield Finding(self._describe_slow_receiver(receiver), page)
        idle = self._measure_cell_idle_share()
        if idle is not None and idle >= MIN_IDLE_SHARE:
            text = f"cells had no ticket for {idle:.0%} of their time "
            text += f"({self._format_keys('rollout.max_head_offpolicyness')})"
            yield Finding(text, self._link("metrics", text=CELL_IDLE_S_METRIC))

    def _find_longest_awaited_episode(self) -> BatchEpisode | None:
        split = self._split
        if split is None or split.last_episodes_s < MIN_LAST_EPISODES_WAIT_SHARE * split.total_s:
            return None
        longest = max(self._timed, key=lambda one: one.record.duration_s)
        least_s = MIN_LAST_TO_MEDIAN_DURATION * self._compute_median_duration_s()
        return longest if longest.record.duration_s >= least_s else None

    def _describe_late_episode(self, late_episode: BatchEpisode) -> str:
        split, record = self._split, late_episode.record
        assert split is not None
        place = self._name_cell(record.cell)
        return (
            f"the last episodes of batches were awaited for "
            f"{split.last_episodes_s / split.total_s:.0%} of the waits: "
            f"{late_episode.title}{f' on {place}' if place else ''} took "
            f"{record.duration_s:.1f} s, where {self._compute_median_duration_s():.1f} s is usual"
        )

    def _describe_slow_receiver(self, slow: ReplicaOutlier) -> str:
        return (
            f"{self._name_replica(slow)} takes {slow.value:.2f} s for an update, "
            f"the others {slow.others:.2f} s"
        )

    def _format_replica_table(self) -> list[str]:
        """Every replica, if there are several."""
        keys = sorted(self._call_speeds.keys() | self._update_times.keys())
        if len(keys) < 2:
            return []
        rows = [("cell", "replica", "node", "tokens/s in a call", "s at an update", "starts")]
        for cell, replica in keys:
            speed, update_s = (
                one.get((cell, replica)) for one in (self._call_speeds, self._update_times)
            )
            rows.append(
                (
                    cell,
                    str(replica),
                    self._nodes.get(cell, "-"),
                    "-" if speed is None else f"{speed:.0f}",
                    "-" if update_s is None else f"{update_s:.2f}",
                    str(self._starts[cell, replica] or "-"),
                )
            )
        return format_table(rows, right_aligned_columns=(1, 3, 4, 5))

    def _read_times_between_calls(self) -> list[tuple[str, float]]:
        """Times between model calls, by the tool that was called."""
        several = [one for one in self._episodes if len(one.record.calls) > 1][-MAX_READ_ROWS:]
        try:
            rows = read_first_row_of_each_episode(self._paths, several)
        except ShardError as error:
            self._problems.append(str(error))
            return []
        return [pause for row in rows for pause in list_times_between_calls(row)]

    def _map_cells_to_nodes(self) -> dict[str, str]:
        try:
            attempts = self._paths.list_attempts()
            files = list_log_files(self._paths, attempts[-1]) if attempts else []
        except OSError:
            return {}
        return {file.job_or_cell: file.node for file in files if file.node}

    def _measure_cell_idle_share(self) -> float | None:
        cells = int(get_recipe_value(self._recipe, "inference.cells") or 1)
        pairs = [
            (idle, cells * (get_number(row, "time/step_s") or 0.0))
            for row in self._rows
            if (idle := get_number(row, CELL_IDLE_S_METRIC)) is not None
        ]
        total = sum(step_s for _, step_s in pairs)
        return sum(min(idle, step_s) for idle, step_s in pairs) / total if total else None

    def _format_keys(self, *keys: str) -> str:
        """Keys that the recipe has with their values, as `a.b=1 and c.d=2`."""
        values = {key: get_recipe_value(self._recipe, key) for key in keys}
        return " and ".join(f"{key}={value}" for key, value in values.items() if value is not None)

    def _list_times(self, phase: str) -> list[float]:
        return [one for one in list_numbers(self._rows, f"time/{phase}_s") if one > 0]

    def _compute_mean(self, metric: str) -> float:
        return statistics.fmean(list_numbers(self._rows, metric) or [0.0])

    def _compute_median_duration_s(self) -> float:
        return statistics.median(one.record.duration_s for one in self._timed)

    def _link(self, page: str, **query: str) -> str:
        return build_page_url_fragment(page, self._run, **query)

    def _link_episode(self, episode: BatchEpisode) -> str:
        return self._link("trajectory", row=episode.first_row_name)

    def _name_replica(self, outlier: ReplicaOutlier) -> str:
        place = self._name_cell(outlier.cell)
        return f"replica {outlier.replica} of {place}" if outlier.replica >= 0 else place

    def _name_cell(self, cell: str) -> str:
        node = self._nodes.get(cell)
        return f"{cell} (node {node})" if node else cell
