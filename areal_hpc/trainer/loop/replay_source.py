"""Batches of a recorded run, to be trained on again.

Learner, loop and checkpoints are those of a run. Nobody is sent the weights.
"""

from __future__ import annotations

from areal_hpc.jobs.signals import StopRequest
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop.loop import BatchSource, Coordinator
from areal_hpc.trainer.loop.schedule import Schedule
from areal_hpc.trainer.loop.step_record import StepRecord
from areal_hpc.wire.ledger import BatchManifest


class ReplaySource(BatchSource):
    """The manifests of a recorded run.

    Args:
        layout: Of the directory that leads to them.
    """

    def __init__(self, layout: RunPaths) -> None:
        self._layout = layout

    def next_batch(self, step: int) -> BatchManifest:
        """The recorded batch that leads to `step`.

        Raises:
            ShardError: Its manifest is gone or damaged.
        """
        return read_manifest(self._layout, step)


def make_replay_coordinator(
    learner: Learner,
    layout: RunPaths,
    config: TrainerConfig,
    first_step: int,
    last_step: int,
    stop: StopRequest,
) -> Coordinator:
    """Rank 0's decisions in a replay.

    Args:
        learner: At the checkpoint to go on from.
        layout: Where manifests are read and metrics are written.
        config: How often to save a checkpoint.
        first_step: Rows of metrics begin with this step.
        last_step: Training ends with this step.
        stop: Ends it early.
    """
    version = learner.version
    metrics = MetricsWriter(layout.metrics, None, version.step)
    if version.step >= first_step:  # its row was held back until the checkpoint was durable
        metrics.write(version.step, metrics.reopened or learner.reopened_row)
    schedule = Schedule(
        total_steps=last_step,
        checkpoint_every_steps=config.checkpoint_every_steps,
        export_every_steps=None,
        evaluation_every_steps=0,
        evaluation_tasks=0,
    )
    record = StepRecord(metrics, version, None)
    return Coordinator(schedule, record, ReplaySource(layout), stop)
