"""Writer of step metrics to JSON lines and TensorBoard."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter

from areal_hpc.metrics.step_line import format_step_details, format_step_line
from areal_hpc.metrics.step_metrics import list_evaluated_sets, read_metrics
from areal_hpc.rundir.jsonl import JsonMetricRow, append_line, replace_lines
from areal_hpc.wire.replicas import UpdatePauseStats
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

TENSORBOARD_GROUPS_IN_FRONT = ("reward", "eval", "evaluation")


def format_tensorboard_tag(metric_name: str) -> str:
    """A metric's name in TensorBoard, which sorts groups by their names, digits first."""
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
    """Cost of the newest known update to those who generate."""
    if not pauses:
        return {}
    newest = max((pause.version for pause in pauses), key=_version_sort_key)
    held = [pause for pause in pauses if pause.version == newest]
    return {
        "weights/generation_pause_version": newest,
        "weights/generation_pause_s": max(pause.pause_s for pause in held),
    }


def _version_sort_key(version: str) -> WeightVersion:
    return WeightVersion.parse(version) if version else WeightVersion(-1, -1)


class MetricsWriter:
    """`metrics.jsonl`, its TensorBoard copy, and a line about each step in the process's log.

    On a resume, lines of steps after the checkpoint are removed: those steps will be trained again.
    The line of the saved step itself is taken back too, to be completed and written anew.
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
        """The newest step with an evaluation's reward; -1 when there is none."""
        self.reopened: JsonMetricRow = kept.pop(resume_step, {})
        """The line of the step that training goes on from; empty when there is none."""
        self.reopened.pop("step", None)
        if path.exists():
            replace_lines(path, kept.values())
        self._board: FileWriter | None = None
        if tensorboard_dir:
            self._board = FileWriter(str(tensorboard_dir))
            # Readers then forget what an earlier start wrote of later steps.
            start = SessionLog(status=SessionLog.START)
            self._board.add_event(Event(step=resume_step, session_log=start))
        self._held: list[tuple[int, JsonMetricRow]] | None = None
        self._newest_step = -1
        self.newest_line: JsonMetricRow = {}
        """The newest step of which this process wrote a line, with what it knows beside."""

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
            # As one event: TensorBoard's writer opens its file anew for each.
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
