"""Formatting of tables, durations, times, metric values, answers and commands for people."""

import shlex
import shutil
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from areal_hpc.errors import escape_line
from areal_hpc.metrics.step_metrics import find_metric
from areal_hpc.rundir.paths import RunPaths


def format_table(
    rows: Sequence[Sequence[str]], right_aligned_columns: Container[int] = ()
) -> list[str]:
    """Format rows of one length as lines, every column as wide as its longest cell.

    Columns with an index in `right_aligned_columns` are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right_aligned_columns else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: `45 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_time(unix_s: float) -> str:
    then, today = time.localtime(unix_s), time.localtime()
    form = "%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, then)


def format_value(metric_name: str, value: float) -> str:
    """Format a metric's value with its unit: `41%`, `3.2 s`, `1.5 GiB`, `0.62`."""
    metric = find_metric(metric_name)
    match metric.unit if metric else "":
        case "share":
            return f"{value:.1%}" if 0 < abs(value) < 0.1 else f"{value:.0%}"
        case "bytes":
            return f"{value / 2**30:.3g} GiB"
        case "":
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        case unit:
            return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"


def get_number(row: Mapping[str, Any], metric_name: str) -> float | None:
    value = row.get(metric_name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def list_numbers(rows: Iterable[Mapping[str, Any]], metric_name: str) -> list[float]:
    values = (get_number(row, metric_name) for row in rows)
    return [value for value in values if value is not None]


def list_restart_steps(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the first step of each further start of the trainer."""
    return [
        row["step"]
        for before, row in pairwise(rows)
        if row.get("generation") != before.get("generation")
    ]


def format_step_range(rows: Sequence[Mapping[str, Any]]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    return f"step {first}" if first == last else f"steps {first} to {last}"


@dataclass(frozen=True, slots=True)
class Finding:
    text: str
    page: str = ""
    """Fragment of the dashboard's URL; empty without a page."""


@dataclass(frozen=True, slots=True)
class Answer:
    headline: str
    findings: tuple[Finding, ...] = ()
    hints: tuple[str, ...] = ()
    """Things to try, the most promising first."""
    table: tuple[str, ...] = ()
    is_well: bool = True


def build_page_url_fragment(page: str, run: str, **query: str) -> str:
    return f"#/{page}?{urlencode({'run': run, **query}, quote_via=quote)}"


def format_answer(answer: Answer, run: str) -> list[str]:
    lines = [answer.headline]
    for finding in answer.findings:
        lines.append(f"  {finding.text}")
        if finding.page:
            lines.append(f"    {finding.page}")
    lines += [f"  {line}" for line in answer.table]
    lines += [f"try: {hint.replace('RUN', run)}" for hint in answer.hints]
    if any(finding.page for finding in answer.findings):
        lines.append(f"pages: areal-hpc view {run} prints an address; #/... goes behind it")
    return [escape_line(line) for line in lines]


def get_program_command() -> str:
    path = Path(sys.argv[0])
    if path.name != "areal-hpc":
        return "python -m areal_hpc"
    return path.name if shutil.which(path.name) == str(path) else shlex.quote(str(path))


def format_next_command(command: str, paths: RunPaths) -> str:
    return f"{get_program_command()} {command} {shlex.quote(str(paths.root))}"


def say(message: str) -> None:
    print(message, flush=True)
