"""Every layout against transformers, and checkpoints of one layout resumed under another.

Writes docs/parity.md. Nine launches of one to four ranks, five minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.layout_launch import Findings, launch
from tests.support.parity_table import (
    DOCUMENT,
    FAMILIES,
    LAYOUTS,
    RESUMES,
    Agreement,
    Resume,
    families_of,
    families_resumed,
    shortcomings,
    write,
)
from tests.support.rank_server import rank_server

pytestmark = pytest.mark.timeout(1800)

ORDER = ["DP2", "TP2", "DP2, EP2", "1", "PP2", "CP2", "TP2 x PP2", "TP2 x CP2", "TP2, EP2"]
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
    agreements = [
        Agreement(
            family,
            layout,
            *(found[layout][family][gap] for gap in ("logprob_gap", "gradient_gap", "norm_gap")),
        )
        for family in FAMILIES
        for layout in LAYOUTS
        if family in families_of(layout)
    ]
    resumes = [
        Resume(family, written, read, gaps["loss_gap"], gaps["weight_gap"])
        for written, read in RESUMES
        for family in families_resumed(written, read)
        for gaps in [found[read][family]["resumed_from"][written]]
    ]
    write(agreements, resumes)
    assert shortcomings(DOCUMENT.read_text()) == []
