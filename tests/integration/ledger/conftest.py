from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.ledger.ledger_process import LedgerProcess


@pytest.fixture
def start_ledger(tmp_path: Path) -> Iterator[Callable[..., LedgerProcess]]:
    """Starts a ledger with the settings given; it ends with the test."""
    with ExitStack() as started:
        yield lambda **settings: started.enter_context(LedgerProcess(tmp_path / "run", **settings))


@pytest.fixture
def ledger(start_ledger: Callable[..., LedgerProcess]) -> LedgerProcess:
    return start_ledger(total_steps=2)
