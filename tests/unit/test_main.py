"""Messages at a terminal: errors, progress, and faults of the storage."""

import errno
import io
import os
import pickle
import sys
from pathlib import Path

import pytest

from areal_hpc import __main__
from areal_hpc.cli.main import main
from areal_hpc.errors import (
    ArealError,
    HttpStatusError,
    JobFailedError,
    LedgerRequestError,
    Problem,
    PromptTooLongError,
    ProxyRequestError,
    RecipeError,
    RunInterruptedError,
    escape_line,
)
from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS, get_ticket_id_in_evaluation
from areal_hpc.recipe import reference
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.manifests import EvaluatedTicket, append_evaluated_ticket
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.dashboard import report
from areal_hpc.view.state.live_progress import EvaluationReporter, LiveReporter, PlainReporter
from areal_hpc.view.state.run_view import RunView
from tests.support.environments import CHECKOUT


def test_characters_that_a_locale_lacks_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(reference, "render_key_table", lambda: "a │ b\n")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    with pytest.raises(SystemExit) as ended:
        main(["recipe-keys"])
    sys.stdout.flush()
    assert (ended.value.code, written.getvalue()) == (0, b"a \\u2502 b\n")


def test_full_storage_is_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(runs: object, out: Path, cache_dir: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "recipe.yaml").touch()
    monkeypatch.setattr(report, "write_report", fill_disk)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")])
    assert ended.value.code == 75
    assert capsys.readouterr().err.startswith("error: No space left on device\n  try: make room")


def test_ctrl_c_ends_any_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(reference, "render_key_table", interrupt)
    monkeypatch.setattr(sys, "argv", ["areal-hpc", "recipe-keys"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "error",
    [
        RecipeError.from_problems([Problem("one", "a"), Problem("two", hint="b")]),
        HttpStatusError(503, "http://n01/ready", "later"),
        JobFailedError("the job ended", code=65),
        LedgerRequestError(409, "a newer trainer", hint="go"),
        PromptTooLongError(17, 16, "messages"),
        ProxyRequestError(400, "no such tool", key="tool_choice"),
        RunInterruptedError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_a_pickle_with_all_that_it_carries(error: ArealError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))


def test_a_failure_s_text_begins_no_line_of_its_own() -> None:
    """`status`, `why` and `shards show` print such a text."""
    shown = escape_line("task 3 failed: no\n\x1b[2Jall is well\nreward 1.0")
    assert [line[:6] for line in shown.splitlines()] == ["task 3", "      ", "      "]
    assert "\x1b" not in shown


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
    second = PlainReporter(paths, total_steps=3, sft_steps=0)
    append_line(paths.metrics, {"step": 2, **STEP})
    second.close()
    assert steps_in(capsys.readouterr().out) == [2], "not what an earlier launch told"


@pytest.mark.parametrize("kind", [PlainReporter, LiveReporter])
def test_the_first_weights_have_a_line_without_an_evaluation(
    paths: RunPaths, kind: type[PlainReporter], capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = kind(paths, total_steps=3, sft_steps=0)
    append_line(paths.metrics, {"step": 0, "time/step_s": 1})
    reporter.close()
    assert "step      0/3\n" in capsys.readouterr().out


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
    lines = capsys.readouterr().out.splitlines()
    assert steps_in("\n".join(lines)) == [1, 2, 1, 3]
    assert lines[2].split() == ["step", "1/3", "held-out", "0.250"]
    assert "reward 0.500  held-out 0.750" in lines[3]
    assert RunView(paths).evaluations == [(1, 0.25), (3, 0.75)]


def test_evaluations_count_their_tasks(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(QUICKSTART, ["evaluation.sets.held.dataset.path=x.jsonl"])
    sets = [entry for entry in recipe.evaluation_sets if entry.name == "held"]
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


def test_a_line_stays_as_it_is(reporter: PlainReporter, capsys: pytest.CaptureFixture[str]) -> None:
    line = "the agent raised [bold]KeyError[/bold] at /a/agent.py:100: :bug: " + 200 * "x"
    reporter.print_line(line)
    assert capsys.readouterr().out == f"{line}\n"


def test_a_panel_goes_whatever_its_last_look_meets(paths: RunPaths) -> None:
    reporter = LiveReporter(paths, total_steps=3, sft_steps=0)
    paths.metrics.mkdir()
    with pytest.raises(IsADirectoryError):
        reporter.close()
    assert not reporter._live.is_started
