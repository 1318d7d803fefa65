"""Parts of a batch by the source of the training set that their tasks are from."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.rundir.run_inputs import TrainSources
from areal_hpc.trainer.batch.batch_metrics import group_episode_rewards
from areal_hpc.trainer.batch.packing import Channel, TrainingRow, count_policy_tokens
from areal_hpc.trainer.batch.training_rows import (
    BatchScores,
    build_rows,
    build_rows_to_score,
    measure_share_of_idle_groups,
)
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion


class SourceObjectives:
    """Objectives of a batch's rows: each has that of its task's source.

    The loss of a batch is the sum of its sources' losses, each times the source's share of the
    batch's trained tokens, or of its episodes if its `loss_agg` is a mean over episodes. So the
    objectives of other sources change nothing for a source.
    """

    def __init__(self, sources: TrainSources, objectives: Sequence[ObjectiveConfig]) -> None:
        self._sources = sources
        self.distinct: list[ObjectiveConfig] = []
        """Objectives, each once; a row has the index of its own."""
        # The name of a preset changes nothing beside the values that it has set.
        objectives = [each.model_copy(update={"preset": "default"}) for each in objectives]
        for objective in objectives:
            if objective not in self.distinct:
                self.distinct.append(objective)
        self._index_of_source = [self.distinct.index(objective) for objective in objectives]

    def build_rows_to_score(
        self, batch: Sequence[TrajectoryRow], objective: ObjectiveConfig
    ) -> list[TrainingRow]:
        rows = build_rows_to_score(batch, objective)
        indices = self._list_objective_indices(batch)
        return [replace(row, objective=index) for row, index in zip(rows, indices, strict=True)]

    def build_rows(
        self,
        batch: Sequence[TrajectoryRow],
        current_version: WeightVersion,
        generation_forks: Sequence[GenerationFork],
        scores: BatchScores,
    ) -> list[TrainingRow]:
        indices = self._list_objective_indices(batch)
        rows: dict[int, TrainingRow] = {}
        tokens_per_episode: dict[int, float] = {}
        for number, objective in enumerate(self.distinct):
            members = [i for i, index in enumerate(indices) if index == number]
            own = [batch[i] for i in members]
            part = build_rows(
                own, current_version, generation_forks, objective, _select_scores(scores, members)
            )
            tokens_per_episode[number] = _measure_tokens_per_episode(own, part)
            for i, row in zip(members, part, strict=True):
                rows[i] = replace(row, objective=number)
        ordered = [rows[i] for i in range(len(batch))]
        if len(self.distinct) > 1:
            whole = _measure_tokens_per_episode(batch, ordered)
            for row in ordered:
                if Channel.SCALE in row.channels:  # a mean over the part's episodes
                    row.channels[Channel.SCALE][:] *= whole / tokens_per_episode[row.objective]
        return ordered

    def _list_objective_indices(self, batch: Sequence[TrajectoryRow]) -> list[int]:
        if len(self.distinct) == 1:
            return [0] * len(batch)
        return [
            self._index_of_source[self._sources.find_index(row.record.task_index)] for row in batch
        ]


def _select_scores(scores: BatchScores, members: Sequence[int]) -> BatchScores:
    selected = {}
    for field in fields(scores):
        values = getattr(scores, field.name)
        selected[field.name] = None if values is None else [values[i] for i in members]
    return BatchScores(**selected)


def _measure_tokens_per_episode(
    batch: Sequence[TrajectoryRow], rows: Sequence[TrainingRow]
) -> float:
    episodes = {
        (trajectory.ticket_id, trajectory.episode)
        for trajectory, row in zip(batch, rows, strict=True)
        if count_policy_tokens([row])
    }
    return max(1, count_policy_tokens(rows)) / max(1, len(episodes))


def summarize_sources(
    batch: Sequence[TrajectoryRow], rows: Sequence[TrainingRow], sources: TrainSources
) -> dict[str, float]:
    """Measure the share of each source in a batch, its rewards and its idle groups."""
    if not sources.names or not batch:
        return {}
    source_B = np.array([sources.find_index(row.record.task_index) for row in batch])
    sampled_B = np.array([np.count_nonzero(row.loss_mask_T) for row in batch])
    groups = len({row.ticket_id for row in batch})
    metrics: dict[str, float] = {}
    for index, name in enumerate(sources.names):
        members = np.flatnonzero(source_B == index).tolist()
        own = [batch[i] for i in members]
        rewards = group_episode_rewards(own)
        metrics[f"groups/share/{name}"] = len(rewards) / groups
        metrics[f"tokens/share/{name}"] = float(sampled_B[members].sum() / max(1, sampled_B.sum()))
        if own:
            metrics[f"reward/mean/{name}"] = float(np.concatenate(rewards).mean())
            metrics[f"groups/zero_variance/{name}"] = measure_share_of_idle_groups(
                own, [rows[i] for i in members]
            )
    return metrics
