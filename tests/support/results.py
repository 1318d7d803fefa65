"""Measurements of tests, in files below benchmarks/results, and tables in Markdown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.support.environments import CHECKOUT

RESULTS_DIR = CHECKOUT / "benchmarks" / "results"


def read_results(name: str, nothing: Any) -> Any:
    """Read the measurements so far; `nothing` if there is no such file."""
    path = RESULTS_DIR / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else nothing


def write_results(name: str, measured: Any) -> None:
    (RESULTS_DIR / f"{name}.json").write_text(json.dumps(measured, indent=2) + "\n")


def add_results(name: str, **figures: object) -> dict[str, Any]:
    """Put figures beside those that other tests have measured; all of them."""
    measured: dict[str, Any] = read_results(name, {}) | figures
    write_results(name, measured)
    return measured


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines).replace(" --- ", "---")


def matrix(corner: str, rows: Mapping[str, Mapping[str, object]]) -> str:
    """A table whose rows and columns have names; a cell that is missing is empty."""
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    return markdown(
        (corner, *columns),
        [(name, *(cells.get(column, "") for column in columns)) for name, cells in rows.items()],
    )
