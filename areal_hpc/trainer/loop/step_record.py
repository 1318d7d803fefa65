"""Row of metrics of the step in progress, kept by rank 0."""

import time

from areal_hpc.metrics.step_metrics import PhaseTimer
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.rundir.jsonl import FlatRow
from areal_hpc.wire.weight_version import WeightVersion


class StepRecord:
    """The present weights, and the metrics of the step that made them until they are written.

    At the start `row` is what is known already of that step; None when its row is complete.
    """

    def __init__(self, metrics: MetricsWriter, version: WeightVersion, row: FlatRow | None) -> None:
        self.metrics = metrics
        self._restart_timing()
        self.begin(version, row or {})
        self._is_open = row is not None

    def _restart_timing(self) -> None:
        self.timer = PhaseTimer()
        """Phases since the last row was written."""
        self._began_at = time.monotonic()

    def begin(self, version: WeightVersion, row: FlatRow) -> None:
        """A step was taken; `row` is what is known of its metrics."""
        self.version = version
        self.row = row
        self._is_open = True

    def add(self, step: int, values: FlatRow) -> None:
        """Add metrics of a step; one whose row has been written gets another row."""
        if self._is_open and step == self.version.step:
            self.row |= values
        else:
            self.metrics.write(step, values)

    def write(self, updates: FlatRow) -> None:
        """Write the row once, with the times of its phases and what weight updates cost."""
        if not self._is_open:
            return
        seconds = round(time.monotonic() - self._began_at, 4)
        known: FlatRow = {"version": str(self.version), **self.timer.build_metrics(), **updates}
        # A row reopened by a resume keeps the times of its first writing.
        self.metrics.write(self.version.step, known | {"time/step_s": seconds} | self.row)
        self._is_open = False
        self._restart_timing()
