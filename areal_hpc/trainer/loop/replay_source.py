"""What rank 0 decides when the recorded batches of a run are trained on again.

The learner, the loop and the commits are those of a run. Batches come from manifests instead of a
ledger, and nobody is sent the weights.
"""

from __future__ import annotations

import time

import msgspec

from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.errors import ShardError
from areal_hpc.layout import RunLayout
from areal_hpc.trainer.config import TrainerConfig
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop.commands import Command, Commit, Stop, Train
from areal_hpc.trainer.metrics import Line, MetricsLog
from areal_hpc.weights.version import WeightVersion
from areal_hpc.wire.ledger import BatchManifest


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
        layout: RunLayout,
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
        self._line: Line = {}
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
        return Train(_read_manifest(self._layout, step + 1))

    def trained(self, version: WeightVersion, report: Line) -> None:
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


def _read_manifest(layout: RunLayout, step: int) -> BatchManifest:
    path = layout.manifest(step)
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ShardError(
            f"the batch of step {step} cannot be read: {error}",
            key=str(path),
            hint="restore the file from a backup of the run directory",
        ) from error
