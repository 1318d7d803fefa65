"""Tasks drawn by the user's function, by a ledger that is killed in between."""

from typing import Any

import numpy as np

from areal_hpc.wire.ledger import DropTicketRequest
from tests.integration.ledger.ledger_process import StartLedger
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

CURRICULUM = {
    "curriculum": "tests.integration.ledger.test_curriculum:untried",
    "sys_path": [str(CHECKOUT)],
}


def untried(known: dict[str, Any]) -> Any:
    """Run by the ledger's process: never a task twice."""
    if not np.isnan(known["reward"]).any():
        raise RuntimeError("all were tried")
    return np.isnan(known["reward"])


def test_groups_that_are_over_decide_what_is_drawn_next(start_ledger: StartLedger) -> None:
    ledger = start_ledger(n_train_tasks=4, **CURRICULUM)
    ledger.open_generation()
    trained = ledger.grants("cell-0", tickets=1)
    turned_away = ledger.grants("cell-1", tickets=1)
    first = [grant.task_index for grant in (*trained, *turned_away)]
    assert len(set(first)) == 2
    ledger.settle(ledger.seal([grant.ref for grant in trained]))
    drop = DropTicketRequest("cell-1", turned_away[0].ref, "all 1", "filtered", [1.0] * 4)
    ledger.order("/drop", drop)
    ledger.restart(cell_timeout_s=scaled(1.5))  # it listens for a third of that
    assert ledger.batch(1).settled == 1
    second = [grant.task_index for grant in ledger.grants("cell-0", tickets=1)]
    assert not set(second) & set(first)
    assert len((ledger.paths.root / "curriculum.jsonl").read_text().splitlines()) == 2


def test_a_curriculum_that_fails_is_told_to_the_trainer(start_ledger: StartLedger) -> None:
    ledger = start_ledger(n_train_tasks=2, **CURRICULUM)
    ledger.open_generation()
    ledger.form_batch(1)
    ledger.publish(1)
    assert not ledger.lease(tickets=2).grants
    assert "RuntimeError: all were tried" in ledger.batch(2).trouble
