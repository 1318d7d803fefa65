"""The tables of docs/bias.md: how far expected gradients are from the true ones."""

import statistics

from areal_hpc.recipe.presets import PRESETS
from tests.support.results import read_results
from tests.support.tables import markdown

RESULTS = "bias"
NAMED = 0.01
"""Less of a bias need not be named."""
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


def table_of_three() -> str:
    """Cosines in groups of three."""
    measured: dict[str, dict[str, float]] = read_results(RESULTS, {}).get("three", {})
    rows = [[kind, *(f"{one:.3f}" for one in found.values())] for kind, found in measured.items()]
    return markdown(["", *next(iter(measured.values()), {})], rows)


def table_of_biases() -> str:
    """What turns which presets by more than `NAMED`: their median cosines, the least first."""
    measured: Measured = read_results(RESULTS, {}).get("two", {})
    rows = []
    for scenario, found in measured.items():
        names_of: dict[str, list[str]] = {}
        for name, seeds in found.items():
            cosine = statistics.median(one for one, _ in seeds)
            if name in PRESETS and cosine < 1 - NAMED:
                names_of.setdefault(f"{cosine:.2f}", []).append(f"`{name}`")
        said = [f"{', '.join(names_of[one])} {one}" for one in sorted(names_of, key=float)]
        rows.append([scenario, "; ".join(said) or "none"])
    return markdown(["", "presets and their cosine"], rows)


def table_of_eight() -> str:
    """Cosines in groups of eight."""
    measured: dict[str, dict[str, list[float]]] = read_results(RESULTS, {}).get("eight", {})
    names = next(iter(measured.values()), {})
    rows = [
        [kind, *(f"{cosine:.3f} +- {error:.3f}" for cosine, error in found.values())]
        for kind, found in measured.items()
    ]
    return markdown(["", *names], rows)
