"""What rank 0 decides when the recorded batches of a run are trained on again.

The learner, the loop and the commits are those of a run. Batches come from manifests instead of a
ledger, and nobody is sent the weights.
"""

from __future__ import annotations

import time

from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.rundir.jsonl import FlatRow
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.commands import Command, Commit, Stop, Train
from areal_hpc.trainer.config import TrainerConfig
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.metrics import MetricsLog
from areal_hpc.wire.weight_version import WeightVersion


class Replay:
    """Rank 0's decisions, from the manifests of a recorded run.

    Args:
        learner: At the commit to go on from.
        layout: Where manifests are read and metrics are written.
        config: How often to commit.
        first_step: Lines of metrics begin with this step.
        last_step: Training ends with this step.
        stop: Ends it early.
    """

    def __init__(
        self,
        learner: Learner,
        layout: RunPaths,
        config: TrainerConfig,
        first_step: int,
        last_step: int,
        stop: StopRequest,
    ) -> None:
        self._layout = layout
        self._every_steps = config.commit_every_steps
        self._last_step = last_step
        self._stop = stop
        self._step = self._committed_step = learner.state.step
        self._metrics = MetricsLog(layout.metrics, None, self._step)
        self._line: FlatRow = {}
        if self._step >= first_step:  # its line was held back until the commit was durable
            self._metrics.write(self._step, self._metrics.reopened or learner.reopened_line)
        self._began_at = time.monotonic()

    def next(self) -> Command:
        """What all ranks do now.

        Raises:
            ShardError: The manifest of the next batch is gone or damaged.
        """
        step, is_last = self._step, self._step >= self._last_step
        is_due = is_last or step % self._every_steps == 0 or self._stop.requested
        if is_due and self._committed_step < step:
            return Commit(self._line)
        if self._line:
            seconds = round(time.monotonic() - self._began_at, 4)
            self._metrics.write(step, {"time/step_s": seconds, **self._line})
            self._line = {}
        if is_last or self._stop.requested:
            return Stop(finished=is_last)
        self._began_at = time.monotonic()
        return Train(read_manifest(self._layout, step + 1))

    def trained(self, version: WeightVersion, report: FlatRow) -> None:
        """A step was taken; `report` is what is known of its metrics."""
        self._step, self._line = version.step, report

    def commit_begun(self, seconds: float) -> None:
        """The current step is copied, and will be durable soon. Its line waits for that."""
        self._committed_step = self._step
        self._line["time/commit_s"] = round(seconds, 4)
        self._metrics.hold()

    def committed(self, seconds: float) -> None:
        """The commit in the writing is durable."""
        self._metrics.release()
