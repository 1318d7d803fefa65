"""Progress lines: each finished step once, also over resumes and fresh starts."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.evaluation.ticket_numbers import STEP_OF_LOADED_WEIGHTS, get_ticket_id_in_evaluation
from areal_hpc.launch import run
from areal_hpc.metrics.step_line import (
    describe_step_efficiency,
    estimate_remaining_s,
    format_step_line,
)
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.manifests import EvaluatedTicket, append_evaluated_ticket
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view import learning_curve
from areal_hpc.view.evaluations.evaluation_progress import EvaluationReporter
from areal_hpc.view.learning_curve import draw_learning_curve
from areal_hpc.view.state.live_progress import LiveReporter, PlainReporter
from areal_hpc.view.state.run_state import RunSnapshot, SnapshotReader, read_run_snapshot
from areal_hpc.view.state.summary import summarize_run
from tests.support.environments import CHECKOUT

QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"

STEP = {
    "reward/mean": 0.5,
    "throughput/wall_tokens_per_s": 100.0,
    "staleness/mean": 0.0,
    "staleness/max": 0,
    "logprob/engine_trainer_max_abs_diff": 1e-6,
    "logprob/compared_tokens": 10,
    "staleness/mixed_version_rows": 0,
    "tokens/trained": 1,
    "time/step_s": 1.0,
}


def steps_in(text: str) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in text.splitlines() if "step" in line]


@pytest.fixture
def reporter(paths: RunPaths) -> PlainReporter:
    return PlainReporter(paths, total_steps=3, sft_steps=0)


def test_each_step_is_told_once_and_again_after_it_was_taken_back(
    paths: RunPaths, reporter: PlainReporter, capsys: pytest.CaptureFixture[str]
) -> None:
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
    again = PlainReporter(paths, total_steps=3, sft_steps=0)
    append_line(paths.metrics, {"step": 2, **STEP})
    again.close()
    assert steps_in(capsys.readouterr().out) == [2], "not what an earlier launch told"


def test_a_file_of_steps_is_parsed_again_only_once_it_has_changed(paths: RunPaths) -> None:
    append_line(paths.metrics, {"step": 1, **STEP})
    reader = SnapshotReader(paths)
    assert [row["step"] for row in reader.read().steps] == [1]
    known = paths.metrics.stat()
    paths.metrics.write_text(paths.metrics.read_text().replace('"step":1', '"step":7'))
    os.utime(paths.metrics, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert [row["step"] for row in reader.read().steps] == [1], "as far as a look at it tells"
    append_line(paths.metrics, {"step": 8, **STEP})
    assert [row["step"] for row in reader.read().steps] == [7, 8]
    paths.metrics.unlink()
    assert reader.read().steps == ()


def test_an_evaluation_that_ends_late_is_told_once_under_its_own_step(
    paths: RunPaths, reporter: PlainReporter, capsys: pytest.CaptureFixture[str]
) -> None:
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
    snapshot = read_run_snapshot(paths)
    assert snapshot.evaluations == [(1, 0.25), (3, 0.75)]
    assert snapshot.steps[-1]["step"] == 3


def test_an_evaluation_tells_of_as_many_tasks_as_its_sets_have(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(QUICKSTART, ["evaluation.sets.held.dataset.path=x.jsonl"])
    sets = [one for one in recipe.evaluation_sets if one.name == "held"]
    bound = sets[0].tasks
    EvaluationReporter(paths, sets).show_progress("train")
    reporter = EvaluationReporter(paths, sets)
    paths.data_dir.mkdir()
    paths.evaluation_tasks("held").write_text('{"n": 1}\n' * 20)
    done = EvaluatedTicket(get_ticket_id_in_evaluation(sets[0].number, 3), 1, [1.0])
    append_evaluated_ticket(paths, STEP_OF_LOADED_WEIGHTS, done)
    reporter.show_progress("train")
    assert bound > 20
    assert capsys.readouterr().out.split() == ["tasks", f"0/{bound}", "tasks", "1/20"]


def test_a_line_is_printed_as_it_is(
    reporter: PlainReporter, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "the agent raised [bold]KeyError[/bold] at /a/agent.py:100: :bug: " + 200 * "x"
    reporter.print_line(line)
    assert capsys.readouterr().out == f"{line}\n"


def test_what_could_not_be_compared_is_said_in_words(
    paths: RunPaths, reporter: PlainReporter, capsys: pytest.CaptureFixture[str]
) -> None:
    append_line(paths.metrics, {"step": 1, **STEP, "logprob/compared_tokens": 0})
    reporter.report_new_steps()
    assert "not compared" in capsys.readouterr().out
    append_line(paths.metrics, {"step": 2, **STEP, "logprob/engine_trainer_max_abs_diff": None})
    reporter.close()
    assert "engine-trainer not finite" in capsys.readouterr().out
    assert "not finite maximum" in summarize_run(
        paths, read_run_snapshot(paths), program="areal-hpc"
    )


def test_a_steps_line_has_what_its_row_knows_and_one_meaning_of_tokens_per_second(
    paths: RunPaths,
) -> None:
    row = {"step": 2, **STEP, "tokens/trained": 300, "time/step_s": 1.5, "episodes": 4}
    known = row | {
        "reward/std": 0.25,
        "groups/zero_variance": 0.25,
        "reply/tokens_mean": 31.4,
        "entropy/mean": 0.412,
        "time/batch_wait_s": 0.9,
    }
    head, *parts = format_step_line(known, 3).split("  reward ")
    assert head.split() == ["step", "2/3"]
    assert f"reward {parts[0]}".split("  ") == [
        "reward 0.500 ± 0.25", "1.5 s (60% waiting for generation)", "200 tokens/s",
        "zero-variance 25%", "length 31", "entropy 0.41", "staleness 0.0 (max 0)",
        "engine-trainer 1.0e-06",
    ]  # fmt: skip
    assert "entropy" not in format_step_line(row, 3)
    append_line(paths.metrics, row)
    said = summarize_run(paths, read_run_snapshot(paths), program="areal-hpc")
    assert "200 tokens/s" in said, "the summary means the same"


def test_the_time_left_and_what_limits_a_step_follow_from_the_last_rows() -> None:
    rows = [
        {"step": step, "time/step_s": 4.0, "time/batch_wait_s": 2.6, "time/train_s": 1.4,
         "groups/zero_variance": 0.5}
        for step in (1, 2, 3)
    ]  # fmt: skip
    assert estimate_remaining_s(rows, 13) == 40.0
    assert estimate_remaining_s([], 13) is None
    assert list(describe_step_efficiency(rows)) == [
        "a step takes 4.0 s: 65% generation, 35% training",
        "50% of the groups had no advantage (zero variance) and taught nothing",
    ]


def test_a_learning_curve_is_labeled_by_what_it_shows() -> None:
    rows = tuple(
        {"step": step, "reward/mean": 0.5, "tokens/sampled": 800, "episodes": 2} for step in (1, 2)
    )
    replies = tuple({**row, "reply/tokens_mean": 40.0} for row in rows)
    for shown, length, of in ((replies, 40.0, "reply"), (rows, 400.0, "episode")):
        rewards, lengths = draw_learning_curve(RunSnapshot(shown, (), None), "a run").axes
        assert lengths.get_ylabel() == f"tokens\nper {of}"
        assert np.asarray(lengths.lines[0].get_ydata()).tolist() == [length, length]
        legend = rewards.get_legend()
        assert legend is not None
        assert [one.get_text() for one in legend.get_texts()][1] == "held-out tasks"


def test_a_learning_curve_that_the_storage_does_not_take_ends_nothing(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(snapshot: object, title: str, out: Path) -> None:
        out.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    append_line(paths.metrics, {"step": 1, **STEP})
    monkeypatch.setattr(learning_curve, "plot_learning_curve", fill_disk)
    run.save_learning_curve_if_possible(paths)
    assert "the learning curve was not drawn: No space left on device" in capsys.readouterr().out
    assert not paths.learning_curve.exists()


def test_a_panel_goes_whatever_its_last_look_meets(paths: RunPaths) -> None:
    reporter = LiveReporter(paths, total_steps=3, sft_steps=0)
    paths.metrics.mkdir()
    with pytest.raises(IsADirectoryError):
        reporter.close()
    assert not reporter._live.is_started
