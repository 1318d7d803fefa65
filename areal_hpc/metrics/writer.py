"""Writing of step metrics: the row in progress, `metrics.jsonl`, TensorBoard, and alerts."""

import dataclasses
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter

from areal_hpc.metrics.alerts import (
    ALERT_WINDOW_ROWS,
    STEPS_BEFORE_REPEATED_ALERT,
    AlertTracker,
)
from areal_hpc.metrics.step_line import format_step_details, format_step_line
from areal_hpc.metrics.step_metrics import (
    PhaseTimer,
    find_step_bottleneck,
    list_evaluated_sets,
    read_metrics,
)
from areal_hpc.recipe.sections.evaluation import AlertsConfig
from areal_hpc.rundir.jsonl import JsonMetricRow, append_line, replace_lines
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.wire.replicas import UpdatePauseStats
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

FILES_PHASE = "files"
ALERT_EVENT = "alert"
TENSORBOARD_GROUPS_IN_FRONT = ("reward", "eval", "evaluation")


def format_tensorboard_tag(metric_name: str) -> str:
    """Return a metric's name in TensorBoard, which sorts groups by their names, digits first."""
    group, slash, rest = metric_name.partition("/")
    if slash and group in TENSORBOARD_GROUPS_IN_FRONT:
        return f"{TENSORBOARD_GROUPS_IN_FRONT.index(group) + 1}_{group}/{rest}"
    return metric_name


def replace_non_finite_by_none(line: JsonMetricRow) -> JsonMetricRow:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }


def summarize_newest_weight_update_pause(pauses: Sequence[UpdatePauseStats]) -> JsonMetricRow:
    """Return the version of the newest weight update, and its longest pause of generation."""
    if not pauses:
        return {}
    newest = max((pause.version for pause in pauses), key=_version_sort_key)
    newest_pauses = [pause for pause in pauses if pause.version == newest]
    return {
        "weights/generation_pause_version": newest,
        "weights/generation_pause_s": max(pause.pause_s for pause in newest_pauses),
    }


def _version_sort_key(version: str) -> WeightVersion:
    return WeightVersion.parse(version) if version else WeightVersion(-1, -1)


class MetricsWriter:
    """Writer of `metrics.jsonl`, its TensorBoard copy, and a line about each step in the log.

    On a resume it removes lines of steps after the checkpoint, which will be trained again. It
    also takes back the line of the saved step, which is completed and written again.
    """

    def __init__(
        self,
        path: Path,
        tensorboard_dir: Path | None,
        resume_step: int,
        total_steps: int | None = None,
    ) -> None:
        self.path = path
        self._total_steps = total_steps
        kept = {line["step"]: line for line in read_metrics(path) if line["step"] <= resume_step}
        self.judged_step = max(
            (step for step in kept if list_evaluated_sets(kept[step])), default=-1
        )
        """Newest step with an evaluation's reward; -1 if there is none."""
        self.reopened: JsonMetricRow = kept.pop(resume_step, {})
        """Line of the step from which training continues; empty if there is none."""
        self.reopened.pop("step", None)
        if path.exists():
            replace_lines(path, kept.values())
        self._board: FileWriter | None = None
        if tensorboard_dir:
            self._board = FileWriter(str(tensorboard_dir))
            # Readers then drop what an earlier start wrote about later steps.
            start = SessionLog(status=SessionLog.START)
            self._board.add_event(Event(step=resume_step, session_log=start))
        self._held: list[tuple[int, JsonMetricRow]] | None = None
        self._newest_step = -1
        self.newest_line: JsonMetricRow = {}
        """Newest step of which this process wrote a line, with all its values."""

    def write(self, step: int, values: JsonMetricRow) -> None:
        """Append a line of one step, or keep it for later after `hold_back_lines`.

        A step whose evaluation ends after its line was written gets another line.
        """
        if self._held is not None:
            self._held.append((step, values))
            return
        line: JsonMetricRow = {"step": step, **replace_non_finite_by_none(values)}
        if step > self._newest_step:
            self._newest_step, self.newest_line = step, line
        else:
            self.newest_line = {**self.newest_line, **line, "step": self._newest_step}
        append_line(self.path, line)
        words = format_step_line(line, self._total_steps), *format_step_details(line)
        log.info("%s", "  ".join(words))
        if self._board is not None:
            # One event for all: TensorBoard's writer reopens its file for each event.
            scalars = [
                Summary.Value(tag=format_tensorboard_tag(name), simple_value=value)
                for name, value in replace_non_finite_by_none(values).items()
                if isinstance(value, int | float)
            ]
            self._board.add_summary(Summary(value=scalars), step)
            self._board.flush()

    def hold_back_lines(self) -> None:
        self._held = self._held or []

    def write_held_lines(self) -> None:
        held, self._held = self._held, None
        for step, values in held or ():
            self.write(step, values)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


class StepRecord:
    """Version of the present weights, and the metrics of its step until they are written.

    `row` holds the metrics of that step known at the start; None if its row is complete.
    `on_written` receives every complete row, with its step, and later metrics of such a row.
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
        """Times of phases since the last row was written."""
        self._began_at = time.monotonic()

    def open_row_of_trained_step(self, version: WeightVersion, row: JsonMetricRow) -> None:
        self.version = version
        self.row = row
        self._is_open = True

    def add_metrics(self, step: int, values: JsonMetricRow) -> None:
        """Add metrics to a step's row, or write another row if that is written already."""
        if self._is_open and step == self.version.step:
            self.row |= values
        else:
            with self.time_files():
                self.metrics.write(step, values)
                self._on_written({"step": step, **values})

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
        # A row that a resume opens again keeps the times of its first writing and gets no
        # others: waits of the new start are not part of the old step's time.
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


class AlertReporter:
    """Reporter of alerts after each step; it reports each alert once.

    Alerts from before this start of the trainer are not repeated. `reopened` is a row that was
    judged then and will be reported again.
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
        """Report new alerts after adding the row of the newest step, or more of a known row."""
        known = next((known for known in self._rows if known["step"] == row["step"]), None)
        if known is None:
            self._rows.append(row)
        else:
            known |= row
        for alert in self._tracker.take_new_alerts([*self._rows]):
            log.warning("alert: %s at step %d: %s", alert.level, alert.step, alert.message)
            self._events.record(ALERT_EVENT, **dataclasses.asdict(alert))
