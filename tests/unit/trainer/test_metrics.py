import math
from pathlib import Path

import msgspec

from areal_hpc.metrics.step_metrics import find_best_step, read_metrics
from areal_hpc.metrics.writer import (
    MetricsWriter,
    replace_non_finite_by_none,
    summarize_newest_weight_update_pause,
)
from areal_hpc.rundir.jsonl import JsonMetricRow, append_line, read_readable_records
from areal_hpc.wire.replicas import UpdatePauseStats


def write_losses(path: Path) -> MetricsWriter:
    """Those of five steps, which are their numbers."""
    writer = MetricsWriter(path, None, 0)
    for step in range(5):
        writer.write(step, {"loss": float(step)})
    return writer


def test_steps_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_losses(path)
    resumed = MetricsWriter(path, None, 3)
    assert resumed.reopened == {"loss": 3.0}
    resumed.write(3, {**resumed.reopened, "eval/reward": 0.5})
    resumed.write(4, {"loss": 40.0})
    assert read_readable_records(path) == [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 3.0, "eval/reward": 0.5},
        {"step": 4, "loss": 40.0},
    ]


def test_a_late_evaluation_belongs_to_its_own_step_and_survives_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = write_losses(path)
    assert first.judged_step == -1
    first.write(1, {"eval/reward": 0.25})
    first.write(3, {"eval/reward": 0.5})
    first.write(4, {"eval/reward": 0.75})
    assert [line["step"] for line in read_readable_records(path)] == [0, 1, 2, 3, 4, 1, 3, 4]
    expected = [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 1.0, "eval/reward": 0.25},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 3.0, "eval/reward": 0.5},
    ]
    assert read_metrics(path) == [*expected, {"step": 4, "loss": 4.0, "eval/reward": 0.75}]
    resumed = MetricsWriter(path, None, 3)
    assert resumed.judged_step == 3
    assert resumed.reopened == {"loss": 3.0, "eval/reward": 0.5}
    assert read_readable_records(path) == expected[:3]
    assert MetricsWriter(path, None, 2).judged_step == 1


def test_numbers_that_are_not_finite_are_null_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsWriter(path, tmp_path / "board", 0)
    line: JsonMetricRow = {
        "nan": math.nan,
        "inf": -math.inf,
        "loss": 1.5,
        "version": "1.2",
        "tokens": 3,
    }
    log.write(1, line)
    log.close()
    known = {"loss": 1.5, "version": "1.2", "tokens": 3}
    assert read_readable_records(path) == [{"step": 1, "nan": None, "inf": None, **known}]
    # A checkpoint carries a line in its own codec, and must be able to read it again.
    assert msgspec.json.decode(
        msgspec.json.encode(line), type=JsonMetricRow
    ) == replace_non_finite_by_none(line)


def test_lines_that_follow_a_checkpoint_wait_until_it_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsWriter(path, None, 0)
    log.write(1, {"loss": 1.0})
    log.hold_back_lines()
    log.write(2, {"loss": 2.0})
    log.write(3, {"loss": 3.0})
    assert [line["step"] for line in read_readable_records(path)] == [1]
    log.write_held_lines()
    log.write(4, {"loss": 4.0})
    assert [line["step"] for line in read_readable_records(path)] == [1, 2, 3, 4]


def test_stalls_are_those_of_the_newest_version_over_all_replicas() -> None:
    pauses = [
        UpdatePauseStats("1.9", 9.0, 8.0),
        UpdatePauseStats("1.10", 0.5, 0.1),
        UpdatePauseStats("1.10", 0.7, 0.3),
        UpdatePauseStats("", 5.0, 5.0),
    ]
    assert summarize_newest_weight_update_pause(pauses) == {
        "weights/generation_pause_version": "1.10",
        "weights/generation_pause_s": 0.7,
    }
    assert summarize_newest_weight_update_pause([]) == {}


def test_the_best_step_is_the_latest_with_the_highest_value_among_those_asked_about(
    tmp_path: Path,
) -> None:
    path, name = tmp_path / "metrics.jsonl", "evaluation/aime/pass@8"
    for step, value in ((1, 0.9), (2, 0.5), (3, 0.5), (4, None), (5, 0.2)):
        append_line(path, {"step": step, name: value})
    append_line(path, {"step": 6, "loss": 1.0})
    assert find_best_step(path, "aime/pass@8", [2, 3, 4, 5, 6]) == 3
    assert find_best_step(path, "aime/pass@8", [1, 2]) == 1
    assert find_best_step(path, "aime/pass@8", [4, 6, 7]) is None
    assert find_best_step(path, "", [1, 2]) is None
