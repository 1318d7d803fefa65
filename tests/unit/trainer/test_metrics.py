from __future__ import annotations

from pathlib import Path

from areal_hpc.telemetry import read_json_lines
from areal_hpc.trainer.metrics import MetricsLog


def test_steps_after_the_commit_are_removed_and_the_committed_line_is_reopened(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, None, 0)
    for step in range(5):
        first.write(step, {"loss": float(step)})
    resumed = MetricsLog(path, None, 3)
    assert resumed.reopened == {"loss": 3.0}
    resumed.write(3, {**resumed.reopened, "eval/reward": 0.5})
    resumed.write(4, {"loss": 40.0})
    assert read_json_lines(path) == [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 3.0, "eval/reward": 0.5},
        {"step": 4, "loss": 40.0},
    ]
