"""Rendering of a report as one HTML file: no scripts, and nothing from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.atomic import write_atomic_private
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.report.charts import N_SERIES_COLORS
from areal_hpc.view.report.content import Report, build_report

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_report(runs: Sequence[RunPaths], out: Path) -> None:
    if out.exists():
        raise RecipeError(f"{out} exists", key="--out", hint="name another file, or remove it")
    write_atomic_private(out, render_report(build_report(runs)).encode(errors="replace"))


def render_report(report: Report) -> str:
    return _TEMPLATES.get_template("report.html.j2").render(report=report, colors=N_SERIES_COLORS)
