"""Parts of a batch by the source of the training set that their tasks are from."""

from collections.abc import Sequence

import numpy as np

from areal_hpc.rundir.run_inputs import TrainSources
from areal_hpc.trainer.batch.batch_metrics import group_episode_rewards
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.batch.training_rows import measure_share_of_idle_groups
from areal_hpc.wire.trajectory import TrajectoryRow


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
