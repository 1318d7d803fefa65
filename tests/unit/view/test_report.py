"""The report on runs: one file, safe to open, with what the runs' files say."""

import json
import re
import stat
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.manifests import EvaluationResult, write_evaluation
from areal_hpc.view.audit.ticket_status import audit_run
from areal_hpc.view.compare import find_changed_keys
from areal_hpc.view.report.charts import (
    Series,
    choose_enclosing_ticks,
    draw_bars,
    draw_curves,
    thin_out_to_extremes,
)
from areal_hpc.view.report.content import (
    build_report,
    compare_evaluations,
    render_report,
    write_report,
)
from tests.support.commands import exit_code_of
from tests.support.dashboard_run import INJECTIONS, SECRET
from tests.support.made_run import MadeEpisode, MadeRun

GROUP = [MadeEpisode(task=place // 4, reward=place / 8) for place in range(8)]


class Page(HTMLParser):
    """Elements and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def make_run(root: Path, steps: int = 8, **recipe: Any) -> MadeRun:
    run = MadeRun(root, **recipe)
    for step in range(steps):
        run.add_step(
            GROUP,
            entropy__mean=0.5 - step / 20,
            generation=1 if step < 5 else 2,
            episode__failures=1,
        )
    return run


def add_evaluation(run: MadeRun, step: int, rewards: list[float]) -> None:
    mean = sum(rewards) / len(rewards)
    result = EvaluationResult(step, len(rewards), mean, rewards, {}, 1)
    write_evaluation(run.paths, "valid", result)


def test_a_report_is_one_private_file_without_scripts_or_requests(tmp_path: Path) -> None:
    run = make_run(tmp_path, cluster={"agents": {"variables": {"HF_TOKEN": SECRET}}})
    for text in INJECTIONS:
        run.add_step([replace(one, text=text, tool=text) for one in GROUP])
        run.add_event(text, text)
    launch = {"attempt": 1, "time": "2026-01-01T00:00:00+00:00", "command": [INJECTIONS[0]]}
    run.paths.provenance.write_text(json.dumps({"launches": [launch]}))
    # The newest batch alone is shown: let its episodes say all of them.
    run.add_step([replace(one, text="".join(INJECTIONS), tool=INJECTIONS[1]) for one in GROUP])
    out = tmp_path / "report.html"
    write_report([run.paths], out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    html = out.read_text()
    page = Page(html)
    assert page.tags <= {
        *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "article"),
        *("h1", "h2", "h3", "h4", "p", "b", "i", "ul", "li", "span", "div", "pre", "code", "table"),
        *("thead", "tbody", "tr", "th", "td", "figure", "figcaption", "details", "summary"),
        *("svg", "line", "text", "polyline", "circle", "rect"),
    }
    names = {name for name, _ in page.attributes}
    assert not [name for name in names if name.startswith("on")]
    assert names.isdisjoint({"src", "href", "srcdoc", "action", "data", "background"})
    assert not re.search(r"url\(|@import", html.partition("</style>")[0])
    assert "default-src 'none'" in html
    assert SECRET not in html
    shown = "".join(page.texts)
    assert [text for text in INJECTIONS if text not in shown] == []


def test_a_report_says_what_the_files_of_the_run_say(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for cell in range(3):
        run.add_event(f"cell-{cell}", "process_exited")
    add_evaluation(run, 0, [0.0, 0.0, 1.0, 0.0])
    add_evaluation(run, 8, [1.0, 1.0, 1.0, 0.0])
    report = build_report([run.paths])
    text = Page(render_report(report)).text
    assert audit_run(run.paths).summary_line in text
    assert "not finished, step 8 of 100" in text
    assert "restarts of the trainer survived 1" in text
    assert "failed tries of episodes 8" in text
    assert "steps limited 8 by generation" in text
    assert "process_exited (cell-2)" in text
    assert "the run is limited by generation" in text
    assert "made/run: step 0 to 8 4 0.250 0.750 +0.500 [-inf, +inf] no difference is shown" in text
    assert "entropy/mean 0.5 nats 0.325 nats 0.15 nats" in text
    assert "trainer.checkpoint_every_steps 5 1" in text, "key, default and value"
    (one,) = report.runs
    assert [shown.example_kind for shown in one.episodes] == [
        *("good", "good", "bad", "bad", "typical", "typical")
    ]
    assert one.episodes[0].facts.startswith("reward 0.875, 3 tokens sampled, 2.0 s, task 1")
    assert [message.role for message in one.episodes[0].messages] == [
        *("user", "assistant", "tool", "assistant")
    ]
    titles = [chart.title for chart in report.curves]
    assert titles == ["training reward", "entropy", "time of a step"]
    assert report.curves[0].svg.count('class="mark"') == 1, "the restart"


def test_several_runs_are_laid_over_one_another_with_what_differs(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, trial_name=name, seed=seed).paths for seed, name in enumerate("ab", 1)
    ]
    report = build_report(runs)
    assert [(key, values) for key, values in report.differing_keys if key == "seed"] == [
        ("seed", ("1", "2"))
    ]
    assert report.curves[0].legend == ("made/a", "made/b")
    assert report.curves[0].svg.count("<polyline") == 2
    assert len(report.runs) == 2


def test_the_command_replaces_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(make_run(tmp_path, steps=3).paths.root)
    assert exit_code_of("report", run) == 0
    assert capsys.readouterr().out.startswith("made-run-report.html: ")
    assert "trained_once=" in (tmp_path / "made-run-report.html").read_text()
    assert exit_code_of("report", run) == 78
    assert "made-run-report.html exists" in capsys.readouterr().err


def test_changed_keys_are_those_that_differ_from_the_defaults() -> None:
    recipe = yaml.safe_load("""
        seed: 1
        trainer: {batch_size: 7, optimizer: {lr: 0.5}}
        rollout: {n_samples: 8, workflow: mine.Agent, workflow_kwargs: {token: s3cret}}
        cluster: {slurm: {jobs: {trainer: {qos: null, partition: big}}}}
        valid_dataset: null
    """)
    found = {key: value for key, _, value in find_changed_keys(recipe)}
    assert found == {
        "trainer.batch_size": "7",
        "trainer.optimizer.lr": "0.5",
        "rollout.workflow": "mine.Agent",
        "rollout.workflow_kwargs.token": "(in recipe.yaml)",
        "cluster.slurm.jobs.trainer.partition": "big",
    }


def make_result(step: int, rewards: list[float]) -> EvaluationResult:
    return EvaluationResult(step, len(rewards), sum(rewards) / len(rewards), rewards, {}, 1)


def test_paired_differences_of_the_same_tasks() -> None:
    first, last = make_result(0, [0.0] * 40), make_result(8, [1.0, 1.0, 1.0, 0.0] * 10)
    sets = {"valid": [first, last], "hard": [first, last]}
    found = list(compare_evaluations([("a", sets, 1), ("b", {"hard": [last, first]}, 1)]))
    assert [one.name for one in found] == [
        "a: step 0 to 8",
        "a, hard: step 0 to 8",
        "b, hard: step 8 to 0",
        "a, hard to b, the last evaluation of each",
    ]
    assert found[0].comparison.difference.value == 0.75
    half_width = found[0].comparison.difference.high - 0.75
    assert half_width == pytest.approx(2.02269 * 0.438529 / 40**0.5, rel=0.1)
    assert [one.comparison.verdict for one in found] == ["better", "better", "worse", "worse"]
    others = [("a", {"valid": [first, last]}, 1), ("b", {"valid": [make_result(0, [1.0])]}, 1)]
    assert len(list(compare_evaluations(others))) == 1, "they have other tasks"


def test_charts_have_round_ticks_and_keep_the_extremes() -> None:
    assert choose_enclosing_ticks(0.13, 0.98) == pytest.approx([0.0, 0.5, 1.0])
    assert choose_enclosing_ticks(3.0, 3.0)[0] < 3.0 < choose_enclosing_ticks(3.0, 3.0)[-1]
    points = [(float(x), 9.0 if x == 777 else 0.0) for x in range(5000)]
    thin = thin_out_to_extremes(points)
    assert len(thin) <= 400
    assert (777.0, 9.0) in thin
    assert draw_curves("t", "", [Series("a", [(1.0, float("nan"))])]) is None
    bars = draw_bars("t", "s", [Series("a", points), Series("b", points)])
    assert bars is not None
    assert bars.svg.count("<rect") == 2, "zeros have no bar"
    assert bars.legend == ("a", "b")
    assert "<b>" not in str(getattr(draw_curves("<b>", "", [Series("a", points)]), "svg", "<b>"))


def test_runs_of_one_name_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps=3).paths for name in ("a", "b")]
    report = build_report(runs)
    assert [run.name for run in report.runs] == [str(paths.root) for paths in runs]
    assert report.curves[0].svg.count("<polyline") == 2


def test_the_start_of_a_run_has_an_evaluation_and_no_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=3)
    append_line(run.paths.metrics, {"step": 0, "time/step_s": 60.0, "eval/reward": 0.25})
    path = run.paths.evaluation(0, "valid")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    report = build_report([run.paths])
    charts = {chart.title: chart.svg for chart in report.curves}
    assert charts["held-out reward"].count("<circle") == 1
    assert charts["time of a step"].count("<circle") == 3
    (problem,) = report.evaluation_problems
    assert "is not a EvaluationResult" in problem
    assert f"not read: {problem[:20]}" in Page(render_report(report)).text
