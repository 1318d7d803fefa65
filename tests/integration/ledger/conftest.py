from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.ledger.ledger_process import LedgerProcess, StartLedger


@pytest.fixture
def start_ledger(tmp_path: Path) -> Iterator[StartLedger]:
    with ExitStack() as started:
        yield lambda **settings: started.enter_context(LedgerProcess(tmp_path / "run", **settings))


@pytest.fixture
def ledger(start_ledger: StartLedger) -> LedgerProcess:
    return start_ledger(total_steps=2)
