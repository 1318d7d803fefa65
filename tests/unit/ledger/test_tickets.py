"""Single situations of the ticket state machine, by name."""

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.ledger.admission import TicketPolicy
from areal_hpc.ledger.tickets import TicketTable
from areal_hpc.rundir.manifests import DroppedTicket
from areal_hpc.wire.ledger import BatchManifest, TicketRef
from tests.unit.ledger.ticket_world import rebuilt, settled


def policy(
    batch_size: int = 2, offpolicyness: int = 0, concurrent: int = 100, total_steps: int = 10
) -> TicketPolicy:
    return TicketPolicy(batch_size, offpolicyness, concurrent, total_steps, cell_timeout_s=30.0)


@pytest.mark.parametrize(
    ("limits", "granted"),
    [
        *((policy(offpolicyness=steps), 2 * (steps + 1)) for steps in (0, 1, 4)),
        (policy(offpolicyness=4, concurrent=3), 3),
        (policy(offpolicyness=4, total_steps=2), 4),
    ],
)
def test_as_many_run_as_staleness_concurrency_and_need_allow_and_one_that_is_dropped_is_replaced(
    limits: TicketPolicy, granted: int
) -> None:
    tickets = TicketTable(limits)
    refs = tickets.lease_tickets("a", 100, 0.0)
    assert len(refs) == granted
    assert tickets.drop(DroppedTicket(refs[0], "boom"))
    assert tickets.lease_tickets("a", 100, 0.0) == [TicketRef(granted, 1)]


def test_a_grant_whose_reply_was_lost_is_issued_again_at_once() -> None:
    """The cell lives and reports, but does not mention the ticket."""
    tickets = TicketTable(policy())
    _, kept = tickets.lease_tickets("a", 2, 0.0)
    tickets.reconcile_cell_report("a", [kept], [], 1.0)
    assert tickets.lease_tickets("a", 9, 1.0) == [TicketRef(0, 2)]
    assert tickets.get_state(kept.ticket_id) == "leased"


AHEAD = policy(offpolicyness=4)


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
        rebuilt(AHEAD, manifests=batches)
