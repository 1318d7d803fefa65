"""Pages of runs whose files are damaged or missing: the rest is shown, and the damage named."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_hpc.rundir.manifests import EvaluationResult, write_evaluation
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.dashboard.app import DashboardApp
from areal_hpc.view.dashboard.report import write_report
from tests.support.dashboard_run import make_run

SECRET = "s" * 32
ROW = "cell-0-000000.h5/5"
"""Of an evaluation."""
PAGES = (
    *("runs", "overview", "summary", "metrics", "evaluations", "timeline", "rows", "failures"),
    "trajectory",
)
BINARY = bytes(range(256)) * 20
OTHER_VERSION = "trainer: {total_steps: many}\nevaluation: 5\nmodel: 5\n"

RECIPE_PAGES = {"overview", "summary"}
DAMAGE: dict[str, tuple[Callable[[RunPaths], Any], set[str]]] = {
    # what happens to the run, and the pages that can but say so
    "recipe cut": (lambda run: run.recipe.write_text("trainer: ["), RECIPE_PAGES),
    "recipe empty": (lambda run: run.recipe.write_text(""), RECIPE_PAGES),
    "recipe binary": (lambda run: run.recipe.write_bytes(BINARY), RECIPE_PAGES),
    "recipe of another version": (lambda run: run.recipe.write_text(OTHER_VERSION), {"overview"}),
    "metrics missing": (lambda run: run.metrics.unlink(), {"timeline"}),
    "metrics binary": (lambda run: run.metrics.write_bytes(BINARY), {"timeline"}),
    "metrics without steps": (
        lambda run: run.metrics.write_text('{"reward/mean": 1}\n'),
        {"overview", "summary", "metrics", "timeline"},
    ),
    "metrics of another version": (
        lambda run: run.metrics.write_text('{"step": 1}\n{"step": "two"}\n'),
        {"overview", "summary", "metrics", "timeline"},
    ),
    "spans binary": (lambda run: write_spans(run, BINARY), set()),
    "spans of another version": (lambda run: write_spans(run, b'[1]\n{}\n{"type":5}\n'), set()),
    "events binary": (lambda run: run.events.write_bytes(BINARY), set()),
    "shards missing": (lambda run: remove(run.shards_dir), {"trajectory"}),
    "shards and index missing": (
        lambda run: remove(run.shards_dir, run.shard_index_dir),
        {"trajectory"},
    ),
}


def write_spans(run: RunPaths, content: bytes) -> None:
    path = run.spans("trainer-trainer")
    path.parent.mkdir()
    path.write_bytes(content)


def remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    run = make_run(tmp_path / "runs")
    write_evaluation(run, "valid", EvaluationResult(1, 2, 0.5, [0.0, 1.0], {}, 1))
    shutil.copytree(run.root, run.root.with_name("whole"))
    return run


@pytest.mark.parametrize("damage", DAMAGE)
def test_pages_show_what_is_whole_and_name_what_is_not(
    damage: str, run: RunPaths, tmp_path: Path
) -> None:
    act, told = DAMAGE[damage]
    act(run)
    app = DashboardApp(tmp_path / "runs", SECRET, tmp_path / "cache")
    answers = asyncio.run(ask_all_pages(app))
    app.close()
    assert {page for page, answer in answers.items() if answer.status_code != 200} == told
    for page in told:
        assert set(answers[page].json()) == {"error"}, page
    damaged, whole = answers["runs"].json()["runs"]
    assert (whole["step"], "problem" in whole) == (1, False), "others are shown all the same"
    assert ("problem" in damaged) == ("overview" in told)
    if "recipe" in damage:
        assert answers["trajectory"].json()["set"] == "valid"
        assert len(answers["rows"].json()["problems"]) == 1
        assert answers["evaluations"].json()["problem"]


async def ask_all_pages(app: DashboardApp) -> dict[str, httpx.Response]:
    """Every page of data of the run `shown/run`."""
    address = f"http://pages/{SECRET}/data/"
    query = {"run": "shown/run", "row": ROW}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=address) as client:
        return {page: await client.get(page, params=query) for page in PAGES}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_report_has_what_is_whole_and_names_what_is_not(
    damage: str, run: RunPaths, tmp_path: Path
) -> None:
    act, told = DAMAGE[damage]
    act(run)
    out = tmp_path / "report.html"
    assert write_report([run], out, tmp_path / "cache") == (0 if "shards" in damage else 9)
    data = re.search(r'id="report">(.*?)</script>', out.read_text())
    assert data
    pages = json.loads(data[1])["runs"]["shown/run"]
    errors = {page for page, content in pages.items() if "error" in content}
    assert errors == told - {"trajectory"}


def test_a_damaged_page_that_is_asked_for_again_is_logged_once(
    run: RunPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.recipe.write_text(OTHER_VERSION)
    app = DashboardApp(tmp_path / "runs", SECRET, tmp_path / "cache")
    for _ in range(2):
        asyncio.run(ask_all_pages(app))
    app.close()
    logged = [one for one in caplog.records if one.exc_info]
    assert sorted(one.getMessage().split()[0] for one in logged) == [str(run.root), "data/overview"]
