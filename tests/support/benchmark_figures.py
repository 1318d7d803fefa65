"""Benchmarks cut down: what they print last, and what they write."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.commands import areal_hpc, said_by


def check_benchmark_figures(
    name: str, few: Sequence[str], keys: Sequence[str], folder: Path
) -> None:
    """Run `areal-hpc bench`; the last line it prints is one JSON object of what it writes."""
    out = folder / "results.json"
    said = said_by(areal_hpc("bench", name, *few, "--out", out))
    figures = json.loads(said.splitlines()[-1])
    assert figures.keys() >= {*keys}
    assert all(isinstance(value, float) for value in figures.values())
    # Latencies that are added are differences of measured ones.
    assert all(value >= 0 for key, value in figures.items() if not key.startswith("added_"))
    assert json.loads(out.read_text()).items() >= figures.items()
