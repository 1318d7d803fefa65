"""What tests measured, below benchmarks/results."""

import json
from typing import Any

from tests.support.environments import CHECKOUT

RESULTS_DIR = CHECKOUT / "benchmarks" / "results"


def read_results(name: str, nothing: Any) -> Any:
    """What was measured so far; `nothing` if there is no such file."""
    path = RESULTS_DIR / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else nothing


def write_results(name: str, measured: Any) -> None:
    """Put it in the place of what was measured before."""
    (RESULTS_DIR / f"{name}.json").write_text(json.dumps(measured, indent=2) + "\n")


def add_results(name: str, **figures: object) -> None:
    """Put figures beside those that other tests have measured."""
    write_results(name, read_results(name, {}) | figures)
