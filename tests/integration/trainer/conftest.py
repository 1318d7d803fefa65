"""What the tests here share because it takes long: launches of layouts, and imports of Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.layout_launch import Findings, launch
from tests.support.parity_table import FAMILIES, LAYOUTS
from tests.support.rank_server import RankServer, rank_server

OTHERS = ("TP2", "PP2", "CP2", "DP2, EP2")
ALL = (*OTHERS, "1")


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a layout."""
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    """Starts ranks on request, without importing anything anew."""
    with rank_server() as server:
        yield server


@pytest.fixture(scope="session")
def findings(ranks: RankServer, root: Path) -> dict[str, Findings]:
    """One launch a layout; the last one also resumes from the checkpoints of all others."""
    found = {name: launch(ranks, root / name, LAYOUTS[name], FAMILIES) for name in OTHERS}
    others = [root / name for name in OTHERS]
    found["1"] = launch(ranks, root / "1", LAYOUTS["1"], FAMILIES, others)
    return found
