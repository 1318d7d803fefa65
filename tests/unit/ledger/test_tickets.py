"""Single situations of the ticket state machine, by name."""

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.ledger.admission import TicketPolicy
from areal_hpc.ledger.tickets import TicketTable
from areal_hpc.wire.ledger import BatchManifest, TicketRef
from tests.unit.ledger.ticket_world import rebuilt, settled


def test_a_grant_whose_reply_was_lost_is_issued_again_at_once() -> None:
    """The cell lives and reports, but does not mention the ticket."""
    tickets = TicketTable(TicketPolicy(2, 0, 100, 10, cell_timeout_s=30.0))
    _, kept = tickets.lease_tickets("a", 2, 0.0)
    tickets.reconcile_cell_report("a", [kept], [], 1.0)
    assert tickets.lease_tickets("a", 9, 1.0) == [TicketRef(0, 2)]
    assert tickets.get_state(kept.ticket_id) == "leased"


@pytest.mark.parametrize(
    ("steps_and_tickets", "said"),
    [
        ([(2, 0)], "the manifest of step 1 is missing"),
        ([(1, 0), (3, 1)], "the manifest of step 2 is missing"),
        ([(1, 0), (1, 1)], "the manifest of step 2 is missing"),
        ([(1, 0), (2, 0)], "batches of steps 1 and 2"),
    ],
)
def test_gaps_are_refused(steps_and_tickets: list[tuple[int, int]], said: str) -> None:
    batches = [BatchManifest(at, 1, [settled(TicketRef(i, 1))]) for at, i in steps_and_tickets]
    with pytest.raises(ClusterError, match=said):
        rebuilt(TicketPolicy(2, 4, 100, 10, cell_timeout_s=30.0), manifests=batches)
