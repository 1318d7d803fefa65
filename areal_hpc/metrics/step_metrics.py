"""Metrics of training steps: their catalogue, rows of `metrics.jsonl`, and times of phases."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from areal_hpc.evaluation.set_names import EVALUATION_METRIC_PREFIX, VALIDATION_SET_NAME
from areal_hpc.rundir.jsonl import LineFollower, decode_readable_records, read_readable_records
from areal_hpc.rundir.telemetry.spans import record_span, time_span

VALIDATION_REWARD_METRIC = "eval/reward"
"""Name of the mean reward on the set `valid`, in rows of evaluated steps."""
CELL_IDLE_S_METRIC = "cells/idle_s"
"""Name of the seconds in which cells had no ticket before a step's batch, summed over cells."""
CELL_WAIT_PHASE, BATCH_WAIT_PHASE = "cell_wait", "batch_wait"
"""Phases of a step in which the trainer waits: for any cell, for a batch."""
PACE_STEPS = 50


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of `catalogue.yaml`; a name that ends in `<name>` stands for any number of metrics."""

    name: str
    unit: str
    """Empty for a plain number; `share` is a number from 0 to 1."""
    direction: str
    """Trend in a healthy run: `up`, `down`, `steady`, or `-` if the metric shows no health."""
    meaning: str
    """Formula, or the things that are counted."""
    source: str
    """Input of the computation; a replay of a batch reproduces `batch`, `records` and `loss`."""


@cache
def read_catalogue() -> tuple[Metric, ...]:
    groups = yaml.safe_load((resources.files("areal_hpc.metrics") / "catalogue.yaml").read_text())
    return tuple(
        Metric(name, unit, direction, meaning, group["from"])
        for group in groups
        for name, (unit, direction, meaning) in group["metrics"].items()
    )


@cache
def find_metric(metric_name: str) -> Metric | None:
    for metric in read_catalogue():
        pattern = re.escape(metric.name).replace("<name>", ".+")
        if re.fullmatch(pattern, metric_name):
            return metric
    return None


def list_evaluated_sets(row: Mapping[str, Any]) -> set[str]:
    set_names = {name.split("/")[1] for name in row if name.startswith(EVALUATION_METRIC_PREFIX)}
    return set_names | ({VALIDATION_SET_NAME} if VALIDATION_REWARD_METRIC in row else set())


def select_evaluation_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if name == VALIDATION_REWARD_METRIC or name.startswith(EVALUATION_METRIC_PREFIX)
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one record per step, in the order of steps, merged from all lines about it."""
    records: dict[int, dict[str, Any]] = {}
    for line in read_readable_records(path):
        records.setdefault(line["step"], {}).update(line)
    return [records[step] for step in sorted(records)]


def find_best_step(path: Path, evaluation_metric: str, steps: Sequence[int]) -> int | None:
    """Return the latest of the steps with the highest value of `SET/METRIC`.

    Return None if no step has a value or no metric is named.
    """
    if not evaluation_metric:
        return None
    values = {
        row["step"]: row.get(f"{EVALUATION_METRIC_PREFIX}{evaluation_metric}")
        for row in read_metrics(path)
    }
    valued = [(values[step], step) for step in steps if values.get(step) is not None]
    return max(valued)[1] if valued else None


class PhaseTimer:
    """Wall time per named phase of a step; with `records_spans`, each is recorded as a span."""

    def __init__(self, *, records_spans: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._records_spans = records_spans

    @contextmanager
    def time_phase(self, phase_name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with time_span(phase_name) if self._records_spans else nullcontext():
                yield
        finally:
            self._add(phase_name, time.perf_counter() - began)

    def add_seconds(self, phase_name: str, seconds: float) -> None:
        """Add time to a phase that was measured elsewhere and ends now."""
        self._add(phase_name, seconds)
        if self._records_spans:
            now = time.time()
            record_span(phase_name, now - seconds, now)

    def _add(self, phase_name: str, seconds: float) -> None:
        self.seconds[phase_name] = self.seconds.get(phase_name, 0.0) + seconds

    def build_metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": round(value, 4) for name, value in self.seconds.items()}


SystemPart = Literal["generation", "training", "weights", "evaluation"]


class StepPhase(NamedTuple):
    name: str
    """Name in the metric `time/<name>_s`."""
    system_part: SystemPart
    activity: str


STEP_PHASES = (
    StepPhase("files", "training", "small files"),
    StepPhase("batch_wait", "generation", "waiting for episodes"),
    StepPhase("read", "training", "reading batches"),
    StepPhase("measure", "training", "training"),
    StepPhase("score", "training", "training"),
    StepPhase("pack", "training", "training"),
    StepPhase("train", "training", "training"),
    StepPhase("cell_wait", "generation", "waiting for a replica"),
    StepPhase("publish", "weights", "weight updates"),
    StepPhase("checkpoint", "training", "checkpoints"),
    StepPhase("eval", "evaluation", "evaluation"),
    StepPhase("export", "training", "checkpoints"),
)
"""Phases in the order in which the trainer runs them."""


def sum_times_by_activity(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by activity, including activities without time."""
    seconds: dict[str, float] = {}
    for phase in STEP_PHASES:
        spent = row.get(f"time/{phase.name}_s") or 0.0
        seconds[phase.activity] = seconds.get(phase.activity, 0.0) + spent
    return seconds


def compute_time_shares_by_system_part(row: Mapping[str, Any]) -> dict[SystemPart, float]:
    step_s = row.get("time/step_s") or 0.0
    if step_s <= 0:
        return {}
    shares: dict[SystemPart, float] = dict.fromkeys(get_args(SystemPart), 0.0)
    for phase in STEP_PHASES:
        shares[phase.system_part] += (row.get(f"time/{phase.name}_s") or 0.0) / step_s
    return shares


class StepTimes(NamedTuple):
    steps: int
    mean_s: float
    shares: dict[SystemPart, float]


def select_trained_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("step", 0) > 0 and "reward/mean" in row]


def select_paced_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the newest trained steps whose time is known, from which the pace is computed."""
    return [row for row in select_trained_rows(rows) if row.get("time/step_s")][-PACE_STEPS:]


def measure_step_times(rows: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    names = ("step", *(phase.name for phase in STEP_PHASES))
    sums = {
        f"time/{name}_s": sum(row.get(f"time/{name}_s") or 0.0 for row in rows) for name in names
    }
    if not sums["time/step_s"]:
        return None
    shares = compute_time_shares_by_system_part(sums)
    return StepTimes(len(rows), sums["time/step_s"] / len(rows), shares)


def find_step_bottleneck(row: Mapping[str, Any]) -> SystemPart | None:
    shares = compute_time_shares_by_system_part(row)
    if not shares:
        return None
    return max(shares, key=lambda part: shares[part])


FAILED_TRY_EVENTS = frozenset({"episode_failed", "episode_timed_out"})
"""Events of tries that count against their episode; outages of servers do not."""
MAX_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FailureCounts:
    failed_tries: int = 0
    rewarded: int = 0
    """Failed tries that earn a reward all the same."""


class EpisodeFailureCounter:
    """Reader of the event log of a run from its present end; each line is read once."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFollower(path, from_end=True, max_bytes=MAX_READ_BYTES)

    def count_new_failed_tries(self) -> FailureCounts:
        try:
            content = self._lines.read_new_lines()
        except FileNotFoundError:
            return FailureCounts()
        events = decode_readable_records(content, dict[str, Any])
        failures = [event for event in events if is_failed_training_try(event)]
        return FailureCounts(len(failures), sum("reward" in event for event in failures))


def is_failed_training_try(event: dict[str, Any]) -> bool:
    return event.get("event") in FAILED_TRY_EVENTS and event.get("eval_step", -1) < 0
