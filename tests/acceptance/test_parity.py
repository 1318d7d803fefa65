"""Comparison of every layout with transformers; checkpoints resumed under another layout.

Writes `benchmarks/results/parity.json`, which docs/parity.md shows. Eleven launches of one to four
ranks, six minutes.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.layouts import (
    GRADIENT_BOUND,
    LAYOUTS,
    LOGPROB_BOUND,
    NORM_BOUND,
    RESUME_BOUND,
    Findings,
    families_of,
    launch,
)
from tests.support.rank_server import rank_server
from tests.support.results import add_results

pytestmark = pytest.mark.timeout(1800)

ORDER = [
    *("DP2", "TP2", "DP2, EP2", "1", "PP2", "CP2", "TP2 x PP2", "TP2 x CP2", "TP2, EP2"),
    *("DP2 sharded", "PP2, 3 layers", "1, 3 layers"),
]
"""A checkpoint is written before it is read."""
RESUMES = (
    *(("TP2", "1"), ("1", "PP2"), ("DP2", "TP2"), ("DP2, EP2", "1"), ("1", "TP2, EP2")),
    *(("DP2", "DP2 sharded"), ("PP2, 3 layers", "1, 3 layers")),
)
"""Layouts that a checkpoint is written and read under."""
AGREEMENT_BOUNDS = {"log-probs": LOGPROB_BOUND, "gradients": GRADIENT_BOUND, "norm": NORM_BOUND}
RESUME_BOUNDS = {"loss": RESUME_BOUND, "weights": RESUME_BOUND}


def test_every_layout_agrees_with_transformers(tmp_path: Path) -> None:
    assert sorted(ORDER) == sorted(LAYOUTS)
    findings: dict[str, Findings] = {}
    with rank_server() as server:
        for layout in ORDER:
            others = [tmp_path / written for written, read in RESUMES if read == layout]
            findings[layout] = launch(
                server, tmp_path / layout, LAYOUTS[layout], families_of(layout), others
            )
    gap_names = ("logprob_gap", "gradient_gap", "norm_gap")
    report(
        ("family", "layout"),
        AGREEMENT_BOUNDS,
        {
            (family, layout): tuple(findings[layout][family][name] for name in gap_names)
            for family in families_of("1")
            for layout in LAYOUTS
            if family in families_of(layout)
        },
    )
    resumed = {
        (family, written, read): findings[read][family]["resumed_from"][written]
        for written, read in RESUMES
        for family in families_of(written, read)
    }
    report(
        ("family", "saved under", "resumed under"),
        RESUME_BOUNDS,
        {row: (gaps["loss_gap"], gaps["weight_gap"]) for row, gaps in resumed.items()},
    )


def report(
    header: tuple[str, ...],
    bounds: Mapping[str, float],
    gaps: Mapping[tuple[str, ...], tuple[float, ...]],
) -> None:
    """Keep the gaps, and fail where one is beyond its bound."""
    name = "agreements" if bounds is AGREEMENT_BOUNDS else "resumes"
    columns = (*header, *bounds)
    add_results(
        "parity",
        **{name: [dict(zip(columns, (*row, *own), strict=True)) for row, own in gaps.items()]},
    )
    for row, figures in gaps.items():
        for what, gap in zip(bounds, figures, strict=True):
            assert gap <= bounds[what], (row, what)
