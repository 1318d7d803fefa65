"""Every layout against transformers, and checkpoints of one layout resumed under another.

Writes docs/parity.md. Eleven launches of one to four ranks, six minutes.
"""

from pathlib import Path

import pytest

from tests.support.layout_launch import Findings, launch
from tests.support.parity_table import (
    DOCUMENT,
    LAYOUTS,
    RESUMES,
    ROWS,
    families_of,
    shortcomings,
    write,
)
from tests.support.rank_server import rank_server

pytestmark = pytest.mark.timeout(1800)

ORDER = [
    *("DP2", "TP2", "DP2, EP2", "1", "PP2", "CP2", "TP2 x PP2", "TP2 x CP2", "TP2, EP2"),
    *("PP2, 3 layers", "1, 3 layers"),
]
"""A checkpoint is written before it is read."""


def test_every_layout_agrees_with_transformers(tmp_path: Path) -> None:
    assert sorted(ORDER) == sorted(LAYOUTS)
    found: dict[str, Findings] = {}
    with rank_server() as server:
        for layout in ORDER:
            others = [tmp_path / written for written, read in RESUMES if read == layout]
            found[layout] = launch(
                server, tmp_path / layout, LAYOUTS[layout], families_of(layout), others
            )
    gap_names = ("logprob_gap", "gradient_gap", "norm_gap")
    write(
        "agreements",
        {
            (family, layout): tuple(found[layout][family][name] for name in gap_names)
            for family, layout in ROWS["agreements"]
        },
    )
    resumed = {row: found[row[2]][row[0]]["resumed_from"][row[1]] for row in ROWS["resumes"]}
    write("resumes", {row: (gaps["loss_gap"], gaps["weight_gap"]) for row, gaps in resumed.items()})
    assert shortcomings(DOCUMENT.read_text()) == []
