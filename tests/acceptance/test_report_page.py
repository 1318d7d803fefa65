"""The file of `areal-hpc report` in Chromium: no errors, no requests, light, dark and printed."""

import subprocess
from pathlib import Path

import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.report.content import write_report
from tests.support.environments import CHECKOUT
from tests.support.kept_run import unpack_kept_run

PICTURE = CHECKOUT / "docs" / "images" / "report.png"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The report on a whole run."""
    out = tmp_path / "report.html"
    write_report([RunPaths(unpack_kept_run(tmp_path))], out)
    return out


def browse(report: Path, *options: str) -> str:
    """Open it; what Chromium prints. An error in its console, such as a refused request, fails."""
    ended = subprocess.run(
        ["chromium", *FLAGS, f"--user-data-dir={report.parent / 'profile'}",
         "--enable-logging=stderr", *options, report.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    errors = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    assert errors == []
    return ended.stdout


def test_a_report_is_shown_in_light_and_dark_and_printed(report: Path, tmp_path: Path) -> None:
    """The screenshot goes to docs/images, where a change of it is seen."""
    shown = browse(report, "--dump-dom")
    assert shown.count("<polyline") >= 5
    assert "trained_once=" in shown
    light, dark, pdf = PICTURE, tmp_path / "dark.png", tmp_path / "report.pdf"
    browse(report, "--window-size=1180,1300", f"--screenshot={light}")
    browse(report, "--window-size=1180,1300", f"--screenshot={dark}", DARK)
    browse(report, f"--print-to-pdf={pdf}")
    assert light.read_bytes() != dark.read_bytes()
    assert min(file.stat().st_size for file in (light, dark, pdf)) > 20_000
