"""The pages of `areal-hpc view` in Chromium: what is shown, no errors, nothing run as a script."""

import os
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

import pytest

from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, said_by
from tests.support.dashboard_run import INJECTIONS, make_run
from tests.support.environments import CHECKOUT
from tests.support.kept_run import unpack_kept_run

IMAGES = CHECKOUT / "docs" / "images"
WAIT_MS = 4000
Browse = Callable[..., str]


class Elements(HTMLParser):
    """Names of the elements of a page and of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Open a page of a report in Chromium; the elements that it then has."""

    def open_page(report: Path, page: str, *options: str, **query: str) -> str:
        address = f"{report.as_uri()}#/{page}?{urlencode(query)}"
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        ended = subprocess.run(
            ["chromium", *flags, profile, "--enable-logging=stderr", f"--timeout={WAIT_MS}",
             *(options or ("--dump-dom",)), address],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        errors = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
        assert errors == []
        return ended.stdout

    return open_page


def report_on(run: RunPaths, tmp_path: Path) -> Path:
    out = tmp_path / "report.html"
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said_by(areal_hpc("report", run.root, "--out", out, environ=environ))
    return out


def test_nothing_that_an_agent_wrote_runs_or_becomes_an_element(
    tmp_path: Path, browse: Browse
) -> None:
    run = make_run(tmp_path / "runs")
    report = report_on(run, tmp_path)
    shown = browse(report, "trajectory", run="shown/run", row="cell-0-000001.h5/0")
    for page in (shown, browse(report, "trajectories", run="shown/run")):
        title = re.search(r"<title>(.*?)</title>", page)
        assert title
        assert "pwned" not in title[1]
        assert "onerror" in page, "as text"
        body = page.partition("<main")[2].partition("</main>")[0]
        found = Elements()
        found.feed(body)
        assert not found.tags & {"script", "img", "iframe", "object", "embed", "style", "base"}
        assert not [name for name in found.attributes if name.startswith("on") or name == "src"]
    assert shown.count("pwned") >= 2 * sum("pwned" in text for text in INJECTIONS)


def test_pages_of_a_whole_run_show_it_at_both_widths_in_light_and_dark(
    tmp_path: Path, browse: Browse
) -> None:
    """Screenshots go to docs/images, where a change of them is seen."""
    run = RunPaths(unpack_kept_run(tmp_path))
    report = report_on(run, tmp_path)
    name = f"{run.root.parent.name}/{run.root.name}"
    overview = browse(report, "overview", run=name)
    assert overview.count("<path") >= 8, "curves"
    assert "reward" in overview
    metrics = browse(report, "metrics", run=name)
    assert metrics.count("<figure") >= 40
    rows = browse(report, "trajectories", run=name, sort="reward")
    assert rows.count("<tr") > 100
    summary = browse(report, "summary", run=name)
    assert "trained_once=" in summary
    evaluations = browse(report, "evaluations", run=name)
    assert evaluations.count("<path") == evaluations.count("<polygon") == 1, "mean and interval"
    assert evaluations.count("<tr") > 5, "tasks that changed"
    IMAGES.mkdir(exist_ok=True)
    dark = "--blink-settings=preferredColorScheme=0"
    for file, page, size, further in (
        ("view_overview.png", "overview", "1340,1400", ()),
        ("view_overview_dark.png", "overview", "1340,1400", (dark,)),
        ("view_overview_narrow.png", "overview", "500,1100", ()),
        ("view_evaluations.png", "evaluations", "1340,900", ()),
        ("view_trajectories.png", "trajectories", "1340,800", ()),
    ):
        picture = f"--screenshot={IMAGES / file}"
        browse(report, page, picture, f"--window-size={size}", *further, run=name)
        assert (IMAGES / file).stat().st_size > 20_000
