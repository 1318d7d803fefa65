"""One process that starts ranks, for all tests here: importing Megatron takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.trainer.rank_server import RankServer, rank_server


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    with rank_server() as server:
        yield server
