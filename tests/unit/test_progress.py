"""Progress lines: each finished step once, also over resumes and fresh starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.live_progress import PlainReporter
from areal_hpc.view.run_state import read_run_state
from areal_hpc.view.summary import summarize_run

STEP = {
    "reward/mean": 0.5,
    "throughput/trained_tokens_per_s": 100.0,
    "staleness/mean": 0.0,
    "staleness/max": 0,
    "logprob/engine_trainer_max_abs_diff": 1e-6,
    "logprob/compared_tokens": 10,
}


def steps_in(text: str) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in text.splitlines() if "step" in line]


def test_each_step_is_told_once_and_again_after_it_was_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    reporter = PlainReporter(paths, total_steps=3, sft_steps=0)
    append_line(paths.metrics, {"step": 0, "eval/reward": 0.25})
    append_line(paths.metrics, {"step": 1, **STEP})
    reporter.report_new_steps()
    reporter.report_new_steps()
    append_line(paths.metrics, {"step": 2, **STEP})
    reporter.report_new_steps()
    assert steps_in(capsys.readouterr().out) == [0, 1, 2]
    paths.metrics.unlink()  # a fresh start
    reporter.report_new_steps()
    append_line(paths.metrics, {"step": 1, **STEP})
    reporter.close()
    assert steps_in(capsys.readouterr().out) == [1]


def test_an_evaluation_that_ends_late_is_told_once_under_its_own_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    reporter = PlainReporter(paths, total_steps=3, sft_steps=0)
    append_line(paths.metrics, {"step": 1, **STEP})
    append_line(paths.metrics, {"step": 2, **STEP})
    reporter.report_new_steps()
    append_line(paths.metrics, {"step": 1, "eval/reward": 0.25})
    reporter.report_new_steps()
    append_line(paths.metrics, {"step": 3, **STEP, "eval/reward": 0.75})
    reporter.close()
    told = capsys.readouterr().out.splitlines()
    assert steps_in("\n".join(told)) == [1, 2, 1, 3]
    assert told[2].split() == ["step", "1/3", "held-out", "0.250"]
    assert "reward 0.500  held-out 0.750" in told[3]
    snapshot = read_run_state(paths)
    assert snapshot.evaluations == [(1, 0.25), (3, 0.75)]
    assert snapshot.steps[-1]["step"] == 3


def test_what_an_earlier_launch_told_is_not_told_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    append_line(paths.metrics, {"step": 1, **STEP})
    reporter = PlainReporter(paths, total_steps=3, sft_steps=0)
    append_line(paths.metrics, {"step": 2, **STEP})
    reporter.close()
    assert steps_in(capsys.readouterr().out) == [2]


def test_a_step_without_compared_tokens_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    reporter = PlainReporter(paths, total_steps=3, sft_steps=0)
    append_line(paths.metrics, {"step": 1, **STEP, "logprob/compared_tokens": 0})
    reporter.close()
    assert "not compared" in capsys.readouterr().out


def test_a_difference_that_is_not_finite_is_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    reporter = PlainReporter(paths, total_steps=3, sft_steps=0)
    line = {"step": 1, **STEP, "logprob/engine_trainer_max_abs_diff": None}
    sizes = {"time/step_s": 1.0, "tokens/trained": 1, "staleness/mixed_version_rows": 0}
    append_line(paths.metrics, line | sizes)
    reporter.close()
    assert "engine-trainer not finite" in capsys.readouterr().out
    assert "not finite maximum" in summarize_run(paths, read_run_state(paths), program="areal-hpc")
