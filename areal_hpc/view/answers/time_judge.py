"""Sentences about the parts of a step's time, and about who stands out. Pure."""

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
    find_replica_slow_at_updates,
    find_slow_replica,
    group_times_outside_calls,
    measure_call_tokens_per_s_by_replica,
    measure_median_update_s_by_replica,
)
from areal_hpc.view.answers.step_parts import StepPart
from areal_hpc.view.answers.wait_split import WaitSplit
from areal_hpc.view.batch_episodes import BatchEpisode
from areal_hpc.view.metric_values import get_number, list_numbers

MIN_LAST_EPISODES_WAIT_SHARE = 0.3
MIN_LAST_TO_MEDIAN_DURATION = 2.0
MIN_IDLE_SHARE = 0.25
SLOW_STORAGE_CAUSE = "the run directory's storage is slow"
FASTER_STORAGE_HINT = "put cluster.fileroot on faster storage"
MIN_USUAL_CALLS_AT_ONCE = 4.0


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


@dataclass(frozen=True, slots=True)
class TimeJudge:
    evidence: SlowRunEvidence
    split: WaitSplit | None
    step_s: float

    def explain_part(self, step_part: StepPart) -> PartVerdict:
        seconds = step_part.seconds
        share = f"{step_part.name}: {seconds:.2f} s a step ({seconds / self.step_s:.0%})"
        match step_part.name:
            case "generation":
                return self._explain_generation(share)
            case "tools":
                return self._explain_tools(share)
            case "admission":
                return self._explain_admission(share)
            case "sealing":
                text = f"{share}: all episodes of the batch had ended, their rows were sealed"
                return PartVerdict(text, SLOW_STORAGE_CAUSE, FASTER_STORAGE_HINT)
            case "weight updates":
                return self._explain_weight_updates(share)
            case "evaluation":
                return self._explain_evaluation(share)
            case "checkpoints":
                return self._explain_checkpoints(share)
            case "reading batches":
                text = f"{share}: shards are read from the storage of the run directory"
                return PartVerdict(text, SLOW_STORAGE_CAUSE, FASTER_STORAGE_HINT)
            case "small files":
                text = f"{share}: metrics are written to the run directory, notes read there"
                return PartVerdict(text, SLOW_STORAGE_CAUSE, FASTER_STORAGE_HINT)
            case "training":
                train, score = (
                    statistics.fmean(list_numbers(self.evidence.rows, f"time/{phase}_s") or [0.0])
                    for phase in ("train", "score")
                )
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
        slow, late = self._find_slow_replica(), self._find_longest_awaited_episode()
        if slow is not None and (late is None or late.record.cell == slow.cell_and_replica[0]):
            hint = f"look at {self._name_replica_and_place(slow)}; exclude its node if it lasts"
            return PartVerdict(text, f"{self._name_replica_and_place(slow)} is slow", hint)
        if late is not None:
            cause = self._describe_long_awaited_episode(late)
            hint = "bound episodes (rollout.episode_timeout_s, rollout.sampling.max_new_tokens), or"
            hint += " rollout.extra_samples, with which the last ones need not be awaited"
            page = build_page_url_fragment("trajectory", self.evidence.run, row=late.first_row_name)
            return PartVerdict(f"{text}; {cause}", cause, hint, page)
        calls = self._measure_calls_at_once_per_replica()
        if calls is not None:
            text += f"; {calls:.1f} at once at each replica on average"
            if calls < MIN_USUAL_CALLS_AT_ONCE:
                keys = format_keys_with_values(
                    self.evidence.recipe, "trainer.batch_size", "rollout.n_samples",
                    "rollout.max_concurrent_rollouts", "rollout.max_head_offpolicyness",
                )  # fmt: skip
                cause = f"{calls:.1f} calls at once at each replica are few"
                hint = f"fewer cells, or more episodes at once ({keys})"
                return PartVerdict(text, cause, hint)
        hint = "more cells, shorter replies, or rollout.max_head_offpolicyness of 1 or more"
        return PartVerdict(text, hint=hint)

    def _explain_tools(self, share_text: str) -> PartVerdict:
        text = f"{share_text}: episodes of the batch were outside of model calls"
        kinds = group_times_outside_calls(self.evidence.episodes, self.evidence.times_between_calls)
        if not kinds:
            return PartVerdict(text)
        told = ", ".join(
            f"{kind.name} {kind.mean_s:.2f} s ({kind.count} times, at most {kind.longest_s:.2f} s)"
            for kind in kinds[:3]
        )
        cause = f"{kinds[0].name} takes {kinds[0].mean_s:.2f} s on average"
        if (late := self._find_longest_awaited_episode()) is not None:
            cause += f"; {self._describe_long_awaited_episode(late)}"
            page = build_page_url_fragment("trajectory", self.evidence.run, row=late.first_row_name)
            return PartVerdict(f"{text}: {told}", cause, f"make {kinds[0].name} faster", page)
        page = build_page_url_fragment("trajectories", self.evidence.run, sort="seconds")
        return PartVerdict(f"{text}: {told}", cause, f"make {kinds[0].name} faster", page)

    def _explain_admission(self, share_text: str) -> PartVerdict:
        recipe = self.evidence.recipe
        keys = format_keys_with_values(
            recipe, "rollout.max_concurrent_rollouts", "rollout.max_head_offpolicyness"
        )
        text = f"{share_text}: no episode of the awaited batch was under way"
        idle = self._measure_cell_idle_share()
        if idle is not None:
            text += f"; cells had no ticket for {idle:.0%} of their time"
        return PartVerdict(
            text, f"the bounds are {keys}" if keys else "", f"raise {keys}" if keys else ""
        )

    def _explain_weight_updates(self, share_text: str) -> PartVerdict:
        rows = self.evidence.rows
        names = sorted({name for row in rows for name in row if name.startswith("weights/")})
        # `reprefill` and `generation_pause` are what replicas saw of the same time.
        phases = {
            name: statistics.fmean(list_numbers(rows, name) or [0.0])
            for name in names
            if name.endswith("_s") and not name.startswith(("weights/gen", "weights/rep"))
        }
        text, cause = share_text, ""
        if phases and (longest := max(phases, key=lambda name: phases[name])):
            text += f": the longest part is {longest}, {phases[longest]:.2f} s"
        if (
            slow := find_replica_slow_at_updates(
                measure_median_update_s_by_replica(self.evidence.events)
            )
        ) is not None:
            cause = (
                f"{self._name_replica_and_place(slow)} takes {slow.value:.2f} s for an update, "
                f"the others {slow.others:.2f} s"
            )
        hint = (
            f"look at the network of {self._name_replica_and_place(slow)}"
            if slow
            else "see docs/weights.md"
        )
        return PartVerdict(
            text,
            cause,
            hint,
            build_page_url_fragment("metrics", self.evidence.run, text="weights/"),
        )

    def _explain_evaluation(self, share_text: str) -> PartVerdict:
        times = [one for one in list_numbers(self.evidence.rows, "time/eval_s") if one > 0]
        keys = format_keys_with_values(self.evidence.recipe, "evaluation.every_steps")
        text = f"{share_text}: {len(times)} of {len(self.evidence.rows)} steps were evaluated, "
        text += f"{statistics.fmean(times):.1f} s each"
        hint = f"evaluation.separate_cell=true, fewer tasks, or a larger {keys}"
        return PartVerdict(
            text, keys, hint, build_page_url_fragment("metrics", self.evidence.run, text="eval")
        )

    def _explain_checkpoints(self, share_text: str) -> PartVerdict:
        times = [one for one in list_numbers(self.evidence.rows, "time/checkpoint_s") if one > 0]
        keys = format_keys_with_values(self.evidence.recipe, "trainer.checkpoint_every_steps")
        text = share_text
        if times:
            text += f": {len(times)} checkpoints of {statistics.fmean(times):.1f} s"
        hint = f"a larger {keys}, or faster storage for cluster.fileroot"
        return PartVerdict(text, "writing of checkpoints keeps the ranks waiting", hint)

    def describe_slow_replicas_and_idle_cells(self, explained_limit: str) -> Iterator[Finding]:
        run = self.evidence.run
        if (slow := self._find_slow_replica()) is not None:
            alone = (
                self.split.only_active_cell_s.get(slow.cell_and_replica[0], 0.0)
                if self.split
                else 0.0
            )
            text = (
                f"{self._name_replica_and_place(slow)} generates {slow.value:.0f} tokens a second "
                f"in a call, the others {slow.others:.0f}"
            )
            if alone > 0 and self.split is not None:
                text += f"; for {alone / self.split.total_s:.0%} of the waits only its cell worked"
            where = f'cell="{slow.cell_and_replica[0]}"'
            yield Finding(
                text, build_page_url_fragment("trajectories", run, where=where, sort="seconds")
            )
        receiver = find_replica_slow_at_updates(
            measure_median_update_s_by_replica(self.evidence.events)
        )
        if receiver is not None and self._name_replica_and_place(receiver) not in explained_limit:
            yield Finding(
                f"{self._name_replica_and_place(receiver)} takes {receiver.value:.2f} s "
                f"for an update, the others {receiver.others:.2f} s",
                build_page_url_fragment("metrics", run, text="weights/"),
            )
        idle = self._measure_cell_idle_share()
        if idle is not None and idle >= MIN_IDLE_SHARE:
            keys = format_keys_with_values(self.evidence.recipe, "rollout.max_head_offpolicyness")
            yield Finding(
                f"cells had no ticket for {idle:.0%} of their time ({keys})",
                build_page_url_fragment("metrics", run, text=CELL_IDLE_S_METRIC),
            )

    def _find_longest_awaited_episode(self) -> BatchEpisode | None:
        split = self.split
        if split is None or split.last_episodes_s < MIN_LAST_EPISODES_WAIT_SHARE * split.total_s:
            return None
        timed = [one for one in self.evidence.episodes if one.is_timed]
        longest = max(timed, key=lambda one: one.record.duration_s)
        usual = statistics.median(one.record.duration_s for one in timed)
        return longest if longest.record.duration_s >= MIN_LAST_TO_MEDIAN_DURATION * usual else None

    def _describe_long_awaited_episode(self, late_episode: BatchEpisode) -> str:
        split, record = self.split, late_episode.record
        assert split is not None
        usual = statistics.median(
            one.record.duration_s for one in self.evidence.episodes if one.is_timed
        )
        place = self._name_cell_with_node(record.cell)
        return (
            f"the last episodes of batches were awaited for "
            f"{split.last_episodes_s / split.total_s:.0%} of the waits: "
            f"{late_episode.title}{f' on {place}' if place else ''} took "
            f"{record.duration_s:.1f} s, where {usual:.1f} s is usual"
        )

    def _find_slow_replica(self) -> ReplicaOutlier | None:
        return find_slow_replica(measure_call_tokens_per_s_by_replica(self.evidence.episodes))

    def _measure_calls_at_once_per_replica(self) -> float | None:
        replicas = {
            (one.record.cell, call.replica)
            for one in self.evidence.episodes
            for call in one.timed_calls
        }
        split = self.split
        if split is None or not replicas or not split.any_call_s:
            return None
        return split.summed_call_s / split.any_call_s / len(replicas)

    def _measure_cell_idle_share(self) -> float | None:
        cells = int(get_recipe_value(self.evidence.recipe, "inference.cells") or 1)
        pairs = [
            (idle, cells * (get_number(row, "time/step_s") or 0.0))
            for row in self.evidence.rows
            if (idle := get_number(row, CELL_IDLE_S_METRIC)) is not None
        ]
        total = sum(step_s for _, step_s in pairs)
        return sum(min(idle, step_s) for idle, step_s in pairs) / total if total else None

    def _name_replica_and_place(self, outlier: ReplicaOutlier) -> str:
        cell, replica = outlier.cell_and_replica
        place = self._name_cell_with_node(cell)
        return f"replica {replica} of {place}" if replica >= 0 else place

    def _name_cell_with_node(self, cell: str) -> str:
        node = self.evidence.node_by_cell.get(cell)
        return f"{cell} (node {node})" if node else cell
