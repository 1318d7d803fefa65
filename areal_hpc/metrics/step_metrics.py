"""Names and rows of step metrics, and their reader."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from areal_hpc.evaluation.set_metrics import EVALUATION_METRIC_PREFIX
from areal_hpc.evaluation.ticket_numbers import VALIDATION_SET_NAME
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.telemetry.spans import record_span, time_span

VALIDATION_REWARD_METRIC = "eval/reward"
"""The metric of a step that was evaluated: the mean reward of the set `valid`."""
CELL_IDLE_S_METRIC = "cells/idle_s"
"""Seconds for which cells had no ticket before a step's batch, added up over cells."""
CELL_WAIT_PHASE, BATCH_WAIT_PHASE = "cell_wait", "batch_wait"
"""Phases of a step in which the trainer waits: for any cell, for a batch."""


def list_evaluated_sets(row: Mapping[str, Any]) -> set[str]:
    found = {name.split("/")[1] for name in row if name.startswith(EVALUATION_METRIC_PREFIX)}
    return found | ({VALIDATION_SET_NAME} if VALIDATION_REWARD_METRIC in row else set())


def select_evaluation_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if name == VALIDATION_REWARD_METRIC or name.startswith(EVALUATION_METRIC_PREFIX)
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One record for each step, in the order of steps: what several lines say of one is merged."""
    found: dict[int, dict[str, Any]] = {}
    for line in read_readable_records(path):
        found.setdefault(line["step"], {}).update(line)
    return [found[step] for step in sorted(found)]


def find_best_step(path: Path, evaluation_metric: str, steps: Sequence[int]) -> int | None:
    """The step of these with the highest value of `SET/METRIC`; the latest of several.

    None where none has a value, or no metric is named.
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
    """Adds up wall time per named phase of a step; `records_spans` also notes when each was."""

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
        """Count time that was measured elsewhere, and ends now, under `phase_name`."""
        self._add(phase_name, seconds)
        if self._records_spans:
            now = time.time()
            record_span(phase_name, now - seconds, now)

    def _add(self, phase_name: str, seconds: float) -> None:
        self.seconds[phase_name] = self.seconds.get(phase_name, 0.0) + seconds

    def build_metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": round(value, 4) for name, value in self.seconds.items()}
