"""Sentences about the parts of a step's time, and about what stands out. Pure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.metrics.step_metrics import CELL_IDLE_S_METRIC
from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.run_recipe import get_recipe_value
from areal_hpc.view.answers.answer import (
    Finding,
    build_page_url_fragment,
    format_keys_with_values,
)
from areal_hpc.view.answers.slow_parts import (
    ReplicaOutlier,
    find_slow_receiver,
    find_slow_replica,
    group_times_outside_calls,
    measure_call_speeds,
    measure_update_times,
)
from areal_hpc.view.answers.step_parts import StepPart, WaitSplit
from areal_hpc.view.batch_episodes import BatchEpisode
from areal_hpc.view.metric_values import get_number, list_numbers

MIN_LAST_EPISODES_WAIT_SHARE = 0.3
MIN_LAST_TO_MEDIAN_DURATION = 2.0
MIN_IDLE_SHARE = 0.25
MIN_USUAL_CALLS_AT_ONCE = 4.0
STORAGE_EXPLANATIONS = {
    "sealing": "all episodes of the batch had ended, their rows were sealed",
    "reading batches": "shards are read from the storage of the run directory",
    "small files": "metrics are written to the run directory, notes read there",
}


@dataclass(frozen=True, slots=True)
class SlowRunEvidence:
    run: str
    recipe: Mapping[str, Any]
    rows: Sequence[JsonRow]
    """Of the last trained steps, oldest first."""
    episodes: Sequence[BatchEpisode] = ()
    times_between_calls: Sequence[tuple[str, float]] = ()
    """Between model calls, by the tool that was called."""
    events: Sequence[JsonRow] = ()
    node_by_cell: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PartVerdict:
    text: str
    cause: str = ""
    hint: str = ""
    page: str = ""


class TimeJudge:
    """What there is to say about the steps of a run."""

    def __init__(self, evidence: SlowRunEvidence, split: WaitSplit | None, step_s: float) -> None:
        self._evidence, self._split, self._step_s = evidence, split, step_s
        self.call_speeds = measure_call_speeds(evidence.episodes)
        self.update_times = measure_update_times(evidence.events)
        self._slow_replica = find_slow_replica(self.call_speeds)
        self._slow_receiver = find_slow_receiver(self.update_times)
        self._timed = [one for one in evidence.episodes if one.is_timed]
        self._late_episode = self._find_longest_awaited_episode()

    def explain_part(self, step_part: StepPart) -> PartVerdict:
        seconds = step_part.seconds
        share = f"{step_part.name}: {seconds:.2f} s a step ({seconds / self._step_s:.0%})"
        match step_part.name:
            case "generation":
                return self._explain_generation(share)
            case "tools":
                return self._explain_tools(share)
            case "admission":
                return self._explain_admission(share)
            case "weight updates":
                return self._explain_weight_updates(share)
            case "evaluation":
                return self._explain_evaluation(share)
            case "checkpoints":
                return self._explain_checkpoints(share)
            case name if name in STORAGE_EXPLANATIONS:
                return PartVerdict(
                    f"{share}: {STORAGE_EXPLANATIONS[name]}",
                    "the run directory's storage is slow",
                    "put cluster.fileroot on faster storage",
                )
            case "training":
                train = self._compute_mean("time/train_s")
                score = self._compute_mean("time/score_s")
                text = f"{share}, of which {train:.2f} s are passes of the model"
                if score > 0:
                    text += f" and {score:.2f} s those of a reference, a teacher or a critic"
                return PartVerdict(text, hint="give the trainer more ranks")
            case "waiting for a replica":
                hint = "areal-hpc why RUN and areal-hpc logs RUN say what became of the cells"
                return PartVerdict(f"{share}: no replica served the weights", hint=hint)
        return PartVerdict(share)

    def _explain_generation(self, share_text: str) -> PartVerdict:
        text = f"{share_text}: model calls of the batch were under way"
        slow, late = self._slow_replica, self._late_episode
        if slow is not None and (late is None or late.record.cell == slow.cell):
            hint = f"look at {self._name_replica(slow)}; exclude its node if it lasts"
            return PartVerdict(text, f"{self._name_replica(slow)} is slow", hint)
        if late is not None:
            cause = self._describe_late_episode(late)
            hint = "bound episodes (rollout.episode_timeout_s, rollout.sampling.max_new_tokens), or"
            hint += " rollout.extra_samples, with which the last ones need not be awaited"
            return PartVerdict(f"{text}; {cause}", cause, hint, self._link_episode(late))
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
                hint = f"fewer cells, or more episodes at once ({keys})"
                return PartVerdict(text, cause, hint)
        hint = "more cells, shorter replies, or rollout.max_head_offpolicyness of 1 or more"
        return PartVerdict(text, hint=hint)

    def _explain_tools(self, share_text: str) -> PartVerdict:
        text = f"{share_text}: episodes of the batch were outside of model calls"
        kinds = group_times_outside_calls(
            self._evidence.episodes, self._evidence.times_between_calls
        )
        if not kinds:
            return PartVerdict(text)
        told = ", ".join(
            f"{kind.name} {kind.mean_s:.2f} s ({kind.count} times, at most {kind.longest_s:.2f} s)"
            for kind in kinds[:3]
        )
        cause = f"{kinds[0].name} takes {kinds[0].mean_s:.2f} s on average"
        page = build_page_url_fragment("trajectories", self._evidence.run, sort="seconds")
        if self._late_episode is not None:
            cause += f"; {self._describe_late_episode(self._late_episode)}"
            page = self._link_episode(self._late_episode)
        return PartVerdict(f"{text}: {told}", cause, f"make {kinds[0].name} faster", page)

    def _explain_admission(self, share_text: str) -> PartVerdict:
        keys = self._format_keys(
            "rollout.max_concurrent_rollouts", "rollout.max_head_offpolicyness"
        )
        text = f"{share_text}: no episode of the awaited batch was under way"
        if (idle := self._measure_cell_idle_share()) is not None:
            text += f"; cells had no ticket for {idle:.0%} of their time"
        if not keys:
            return PartVerdict(text)
        return PartVerdict(text, f"the bounds are {keys}", f"raise {keys}")

    def _explain_weight_updates(self, share_text: str) -> PartVerdict:
        names = {name for row in self._evidence.rows for name in row}
        # `generation_pause` is what replicas saw of the same time.
        phases = {
            name: self._compute_mean(name)
            for name in sorted(names)
            if name.startswith("weights/")
            and name.endswith("_s")
            and not name.startswith("weights/gen")
        }
        text, cause, hint = share_text, "", "see docs/weights.md"
        if phases:
            longest = max(phases, key=lambda name: phases[name])
            text += f": the longest part is {longest}, {phases[longest]:.2f} s"
        if (slow := self._slow_receiver) is not None:
            cause = self._describe_slow_receiver(slow)
            hint = f"look at the network of {self._name_replica(slow)}"
        page = build_page_url_fragment("metrics", self._evidence.run, text="weights/")
        return PartVerdict(text, cause, hint, page)

    def _explain_evaluation(self, share_text: str) -> PartVerdict:
        times = [one for one in list_numbers(self._evidence.rows, "time/eval_s") if one > 0]
        keys = self._format_keys("evaluation.every_steps")
        text = f"{share_text}: {len(times)} of {len(self._evidence.rows)} steps were evaluated, "
        text += f"{statistics.fmean(times):.1f} s each"
        hint = f"evaluation.separate_cell=true, fewer tasks, or a larger {keys}"
        page = build_page_url_fragment("metrics", self._evidence.run, text="eval")
        return PartVerdict(text, keys, hint, page)

    def _explain_checkpoints(self, share_text: str) -> PartVerdict:
        times = [one for one in list_numbers(self._evidence.rows, "time/checkpoint_s") if one > 0]
        keys = self._format_keys("trainer.checkpoint_every_steps")
        text = share_text
        if times:
            text += f": {len(times)} checkpoints of {statistics.fmean(times):.1f} s"
        hint = f"a larger {keys}, or faster storage for cluster.fileroot"
        return PartVerdict(text, "writing of checkpoints keeps the ranks waiting", hint)

    def describe_outliers(self, explained_cause: str) -> Iterator[Finding]:
        """Slow replicas and idle cells, but for what `explained_cause` says already."""
        run = self._evidence.run
        if (slow := self._slow_replica) is not None:
            text = (
                f"{self._name_replica(slow)} generates {slow.value:.0f} tokens a second "
                f"in a call, the others {slow.others:.0f}"
            )
            alone_s = self._split.only_active_cell_s.get(slow.cell, 0.0) if self._split else 0.0
            if self._split is not None and alone_s > 0:
                text += (
                    f"; for {alone_s / self._split.total_s:.0%} of the waits only its cell worked"
                )
            where = f'cell="{slow.cell}"'
            page = build_page_url_fragment("trajectories", run, where=where, sort="seconds")
            yield Finding(text, page)
        receiver = self._slow_receiver
        if receiver is not None and self._name_replica(receiver) not in explained_cause:
            page = build_page_url_fragment("metrics", run, text="weights/")
            yield Finding(self._describe_slow_receiver(receiver), page)
        idle = self._measure_cell_idle_share()
        if idle is not None and idle >= MIN_IDLE_SHARE:
            keys = self._format_keys("rollout.max_head_offpolicyness")
            page = build_page_url_fragment("metrics", run, text=CELL_IDLE_S_METRIC)
            yield Finding(f"cells had no ticket for {idle:.0%} of their time ({keys})", page)

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

    def _link_episode(self, episode: BatchEpisode) -> str:
        return build_page_url_fragment("trajectory", self._evidence.run, row=episode.first_row_name)

    def _format_keys(self, *keys: str) -> str:
        return format_keys_with_values(self._evidence.recipe, *keys)

    def _compute_mean(self, metric: str) -> float:
        return statistics.fmean(list_numbers(self._evidence.rows, metric) or [0.0])

    def _compute_median_duration_s(self) -> float:
        return statistics.median(one.record.duration_s for one in self._timed)

    def _measure_cell_idle_share(self) -> float | None:
        cells = int(get_recipe_value(self._evidence.recipe, "inference.cells") or 1)
        pairs = [
            (idle, cells * (get_number(row, "time/step_s") or 0.0))
            for row in self._evidence.rows
            if (idle := get_number(row, CELL_IDLE_S_METRIC)) is not None
        ]
        total = sum(step_s for _, step_s in pairs)
        return sum(min(idle, step_s) for idle, step_s in pairs) / total if total else None

    def _name_replica(self, outlier: ReplicaOutlier) -> str:
        place = self._name_cell(outlier.cell)
        return f"replica {outlier.replica} of {place}" if outlier.replica >= 0 else place

    def _name_cell(self, cell: str) -> str:
        node = self._evidence.node_by_cell.get(cell)
        return f"{cell} (node {node})" if node else cell
