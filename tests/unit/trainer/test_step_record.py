"""Times of a step: what writing its row takes belongs to the step after it."""

import time
from pathlib import Path

from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.trainer.loop.step_record import StepRecord
from areal_hpc.wire.weight_version import WeightVersion

WRITE_S = 0.2


def test_slow_storage_is_a_phase_of_the_step_that_waits_for_it(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", None, 0)
    # It stands for whatever is written together with the row.
    record = StepRecord(
        metrics, WeightVersion(1, 1), {}, on_written=lambda row: time.sleep(WRITE_S)
    )
    record.write_row_once({})
    record.open_row_of_trained_step(WeightVersion(1, 2), {})
    record.write_row_once({})
    _, second = read_metrics(tmp_path / "metrics.jsonl")
    assert WRITE_S <= second["time/files_s"] <= second["time/step_s"]


def test_a_step_that_a_resume_opens_again_keeps_its_own_times(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", None, 0)
    old = {"time/step_s": 2.0, "time/batch_wait_s": 1.0}
    record = StepRecord(metrics, WeightVersion(2, 5), dict(old))
    record.timer.add_seconds("cell_wait", 52.0)  # SGLang's start in the new launch
    record.write_row_once({})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert {name: value for name, value in row.items() if name.startswith("time/")} == old
    assert row["limit"] == "generation"
