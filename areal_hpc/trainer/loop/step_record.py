"""Row of metrics of the step in progress, kept by rank 0."""

import dataclasses
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from areal_hpc.metrics.alerts import (
    ALERT_WINDOW_ROWS,
    STEPS_BEFORE_REPEATED_ALERT,
    AlertTracker,
)
from areal_hpc.metrics.step_metrics import PhaseTimer, find_step_bottleneck, read_metrics
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.recipe.sections.alerts import AlertsConfig
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.wire.weight_version import WeightVersion

FILES_PHASE = "files"


class StepRecord:
    """The present weights, and the metrics of the step that made them until they are written.

    At the start `row` is what is known already of that step; None when its row is complete.
    `on_written` is told of every row that is written whole, its step included.
    """

    def __init__(
        self,
        metrics: MetricsWriter,
        version: WeightVersion,
        row: JsonMetricRow | None,
        on_written: Callable[[JsonMetricRow], None] = lambda row: None,
    ) -> None:
        self.metrics = metrics
        self._on_written = on_written
        self._restart_timing()
        self.open_row_of_trained_step(version, row or {})
        self._is_open = row is not None

    def _restart_timing(self) -> None:
        self.timer = PhaseTimer(records_spans=True)
        """Phases since the last row was written."""
        self._began_at = time.monotonic()

    def open_row_of_trained_step(self, version: WeightVersion, row: JsonMetricRow) -> None:
        self.version = version
        self.row = row
        self._is_open = True

    def add_metrics(self, step: int, values: JsonMetricRow) -> None:
        """Add metrics of a step; one whose row has been written gets another row."""
        if self._is_open and step == self.version.step:
            self.row |= values
        else:
            with self.time_files():
                self.metrics.write(step, values)

    def write_row_once(self, further: JsonMetricRow) -> None:
        """Write the row once, with the times of its phases and `further` metrics."""
        if not self._is_open:
            return
        with self.time_files():
            free_bytes = shutil.disk_usage(self.metrics.path.parent).free
        known: JsonMetricRow = {
            "version": str(self.version),
            "generation": self.version.generation,
            "unix_time_s": round(time.time(), 3),
            "disk/free_bytes": free_bytes,
            **further,
        }
        # A row that a resume opens again keeps the times of its first writing, and only these:
        # a wait of the new start would be set against the old step's time.
        if "time/step_s" not in self.row:
            known["time/step_s"] = round(time.monotonic() - self._began_at, 4)
            known |= self.timer.build_metrics()
        row = _add_derived_metrics(known | self.row)
        self._is_open = False
        self._restart_timing()
        with self.time_files():
            self.metrics.write(self.version.step, row)
            self._on_written({"step": self.version.step, **row})

    def time_files(self) -> AbstractContextManager[None]:
        return self.timer.time_phase(FILES_PHASE)


def _add_derived_metrics(row: JsonMetricRow) -> JsonMetricRow:
    further: JsonMetricRow = {}
    step_s, tokens = row.get("time/step_s"), row.get("tokens/trained")
    if isinstance(step_s, float) and isinstance(tokens, int) and step_s > 0:
        further["throughput/wall_tokens_per_s"] = tokens / step_s
    if (limit := find_step_bottleneck(row)) is not None:
        further["limit"] = limit
    return row | further


logger = logging.getLogger(__name__)

ALERT_EVENT = "alert"


class AlertReporter:
    """Judges the run after each step, and tells every alert once.

    Alerts that the run had before this start of the trainer are not told again. `reopened` is a
    row that was told of then and will be reported once more.
    """

    def __init__(
        self,
        config: AlertsConfig,
        paths: RunPaths,
        events: EventLog,
        reopened: JsonMetricRow | None = None,
    ) -> None:
        self._events = events
        self._rows: deque[dict[str, Any]] = deque(
            read_metrics(paths.metrics), maxlen=ALERT_WINDOW_ROWS
        )
        self._tracker = AlertTracker(config.off)
        known: list[JsonMetricRow] = [*self._rows, *([reopened] if reopened else [])]
        for judged in range(max(0, len(known) - STEPS_BEFORE_REPEATED_ALERT), len(known)):
            self._tracker.take_new_alerts(known[: judged + 1])

    def report_new_alerts(self, row: JsonMetricRow) -> None:
        """Judge the run by another row of metrics, that of its newest step."""
        self._rows.append(row)
        for alert in self._tracker.take_new_alerts([*self._rows]):
            logger.warning("alert: %s at step %d: %s", alert.level, alert.step, alert.message)
            self._events.record(ALERT_EVENT, **dataclasses.asdict(alert))
