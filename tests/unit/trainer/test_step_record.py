"""Alerts over restarts of the trainer: each is told once."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.recipe.sections.alerts import AlertsConfig
from areal_hpc.rundir.jsonl import JsonMetricRow, read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.trainer.loop.step_record import AlertReporter, StepRecord
from areal_hpc.wire.weight_version import WeightVersion

CUT = {"reply/cut_fraction": 0.5}


def start(paths: RunPaths, resume_step: int) -> tuple[MetricsWriter, AlertReporter]:
    """What a start of the trainer that goes on after `resume_step` makes."""
    metrics = MetricsWriter(paths.metrics, None, resume_step)
    reopened: JsonMetricRow = {"step": resume_step, **metrics.reopened} if metrics.reopened else {}
    events = EventLog(paths.events, "trainer")
    return metrics, AlertReporter(AlertsConfig(), paths, events, reopened)


def train(trainer: tuple[MetricsWriter, AlertReporter], first: int, *rows: dict[str, Any]) -> None:
    metrics, reporter = trainer
    for step, row in enumerate(rows, start=first):
        metrics.write(step, {"episodes": 4, **row})
        reporter.report_new_alerts({"step": step, "episodes": 4, **row})


@pytest.mark.parametrize(
    ("before", "after"),
    [([{}, {}, CUT], [CUT, {}]), ([{}, CUT, {}], [{}, CUT]), ([CUT, {}, {}], [{}, {}, CUT])],
)
def test_a_restart_tells_no_alert_again(
    tmp_path: Path, before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    paths = RunPaths(tmp_path)
    train(start(paths, 0), 1, *before)
    assert len(read_readable_records(paths.events)) == 1
    train(start(paths, len(before)), len(before), *after)  # the step of the checkpoint comes again
    assert len(read_readable_records(paths.events)) == 1


def test_an_alert_that_begins_after_a_restart_is_told(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    train(start(paths, 0), 1, {}, {})
    train(start(paths, 2), 2, {}, CUT, CUT)
    assert [event["step"] for event in read_readable_records(paths.events)] == [3]


def test_a_step_that_a_resume_opens_again_keeps_its_own_times(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", None, 0)
    old = {"time/step_s": 2.0, "time/batch_wait_s": 1.0}
    record = StepRecord(metrics, WeightVersion(2, 5), dict(old))
    record.timer.add_seconds("cell_wait", 52.0)  # SGLang's start in the new launch
    record.write_row_once({})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert {name: value for name, value in row.items() if name.startswith("time/")} == old
    assert row["limit"] == "generation"
