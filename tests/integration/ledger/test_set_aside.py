"""Tickets that are not trained, or not as they were: written first, whatever is killed after."""

import pytest

from areal_hpc.wire.ledger import DropTicketRequest, IrregularTicketCounts, SealedTicket, TicketRef
from areal_hpc.wire.weight_version import WeightVersion
from tests.integration.ledger.ledger_process import LedgerProcess, StartLedger
from tests.support.deadlines import scaled


@pytest.fixture
def ledger(start_ledger: StartLedger) -> LedgerProcess:
    started = start_ledger(max_head_offpolicyness=1, stale_groups="drop")
    started.open_generation()
    return started


def sealed(ledger: LedgerProcess, refs: list[TicketRef], step: int) -> list[SealedTicket]:
    """Sealed and settled, sampled by the weights of `step`."""
    tickets = ledger.seal(refs, oldest_version=WeightVersion(1, step).packed)
    ledger.settle(tickets)
    return tickets


def test_a_stale_ticket_is_dropped_for_good_though_the_ledger_dies(ledger: LedgerProcess) -> None:
    slow, *quick = [grant.ref for grant in ledger.grants("cell-0", tickets=3)]
    sealed(ledger, quick, 0)
    assert ledger.batch(1).manifest is not None
    ledger.publish(1)
    sealed(ledger, [one.ref for one in ledger.grants("cell-1", tickets=2)], 1)
    assert ledger.batch(2).manifest is not None
    ledger.publish(2)
    too_old = sealed(ledger, [slow], 0)
    assert ledger.batch(3).manifest is None
    assert (ledger.status().settled, ledger.status().dropped) == (0, 1)
    # The index still has its rows. The ledger listens for a third of the timeout.
    ledger.restart(cell_timeout_s=scaled(1.5))
    ledger.settle(too_old)
    assert ledger.batch(3).settled == 0
    new = [one.ref for one in ledger.grants("cell-1", tickets=2)]
    assert slow.ticket_id not in {one.ticket_id for one in new}
    sealed(ledger, new, 2)
    manifest = ledger.batch(3).manifest
    assert manifest is not None
    assert [ticket.ref for ticket in manifest.tickets] == new
    assert manifest.counts == IrregularTicketCounts(stale_dropped=1)


def test_a_filtered_ticket_is_replaced_and_stays_filtered(ledger: LedgerProcess) -> None:
    refs = [grant.ref for grant in ledger.grants()]
    assert len(refs) == 4
    drop = DropTicketRequest("cell-0", refs[0], "all 4 rewards are 1", "filtered")
    for _ in range(2):  # repeating it is harmless
        ledger.order("/drop", drop)
    assert len(ledger.lease(held=refs[1:]).grants) == 1
    ledger.restart()
    status = ledger.status()
    assert (status.filtered, status.dropped) == (1, 0)
    sealed(ledger, refs[1:3], 0)
    manifest = ledger.batch(1).manifest
    assert manifest is not None
    assert manifest.counts == IrregularTicketCounts(filtered=1)
