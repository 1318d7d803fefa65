"""Table of `docs/operating.md`: submissions while slurmctld stops, and what became of their jobs.

The figures come from `tests/acceptance/test_submissions.py`.
"""

import statistics
from typing import Any

from tests.support.results import read_results
from tests.support.tables import markdown

Row = dict[str, Any]


def table() -> str:
    """By what `submit` did; the last row is that of all."""
    rows: list[Row] = read_results("submissions", [])
    kinds = (
        ("waited, or noticed nothing", [row for row in rows if outcome(row) == "undisturbed"]),
        ("found a job that was accepted too late", [r for r in rows if outcome(r) == "adopted"]),
        ("gave up before the first job, exit code 75", [r for r in rows if r["repeated"]]),
        ("all", rows),
    )
    header = ("what `submit` did", "times", "median seconds", "most seconds", "unknown jobs")
    return markdown(header, [(title, *_summarize(found)) for title, found in kinds])


def outcome(row: Row) -> str:
    """How slurmctld's silence showed in one submission."""
    if row["repeated"]:
        return "repeated"
    return "adopted" if row["adopted"] else "undisturbed"


def _summarize(rows: list[Row]) -> tuple[int, str, str, int]:
    if not rows:
        return 0, "", "", 0
    took_s = [row["seconds"] for row in rows]
    middle, most = statistics.median(took_s), max(took_s)
    return len(rows), f"{middle:.1f}", f"{most:.1f}", sum(row["orphans"] for row in rows)
