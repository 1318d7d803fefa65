"""The tables of docs/bias.md: how far expected gradients are from the true ones."""

import statistics

from tests.support.results import read_results
from tests.support.tables import markdown

RESULTS = "bias"
Measured = dict[str, dict[str, list[tuple[float, float]]]]
"""By scenario and objective: cosine and ratio of norms of each seed."""


def table(position: int = 0) -> str:
    """Medians over seeds, with the least: of cosines (0), or of ratios of norms (1)."""
    measured: Measured = read_results(RESULTS, {}).get("two", {})
    rows = []
    for scenario, found in measured.items():
        cells = []
        for seeds in found.values():
            numbers = [one[position] for one in seeds]
            least = f" ({min(numbers):.3f})" if position == 0 else ""
            cells.append(f"{statistics.median(numbers):.3f}{least}")
        rows.append([scenario, *cells])
    return markdown(["", *next(iter(measured.values()), {})], rows)


def norm_table() -> str:
    """Ratios of norms."""
    return table(1)


def table_of_eight() -> str:
    """Cosines in groups of eight."""
    measured: dict[str, dict[str, list[float]]] = read_results(RESULTS, {}).get("eight", {})
    names = next(iter(measured.values()), {})
    rows = [
        [kind, *(f"{cosine:.3f} +- {error:.3f}" for cosine, error in found.values())]
        for kind, found in measured.items()
    ]
    return markdown(["", *names], rows)
