"""Single situations of the ticket state machine, by name."""

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.ledger.admission import TicketPolicy
from areal_hpc.ledger.batch_formation import build_next_batch_manifest
from areal_hpc.ledger.tickets import TicketTable
from areal_hpc.rundir.manifests import DroppedTicket
from areal_hpc.wire.ledger import BatchManifest, TicketRef
from tests.unit.ledger.ticket_world import form_batch, rebuilt, settled


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


def test_batches_take_tickets_in_the_order_they_settled_and_asking_changes_nothing() -> None:
    tickets = TicketTable(policy(batch_size=3))
    a, b, c = tickets.lease_tickets("a", 3, 0.0)
    for ref in (c, a, b):
        tickets.settle(settled(ref))
    asked = build_next_batch_manifest(tickets, generation=1)
    assert tickets.n_ready_for_batch == 3
    assert [ticket.ref for ticket in form_batch(tickets).tickets] == [c, a, b]
    assert asked == BatchManifest(1, 1, [settled(ref) for ref in (c, a, b)])


def test_tickets_of_a_silent_cell_finished_or_not_come_first_and_need_no_own_room() -> None:
    tickets = TicketTable(policy(offpolicyness=1))
    lost = tickets.lease_tickets("a", 2, 0.0)
    tickets.reconcile_cell_report("a", lost[:1], lost[1:], 0.0)
    kept = tickets.lease_tickets("b", 2, 0.0)
    tickets.reconcile_cell_report("b", kept, [], 30.0)
    assert tickets.expire_leases(31.0) == 2
    again = tickets.lease_tickets("b", 9, 31.0)
    assert again == [TicketRef(ref.ticket_id, 2) for ref in lost]


def test_a_grant_whose_reply_was_lost_is_issued_again_at_once() -> None:
    """The cell lives and reports, but does not mention the ticket."""
    tickets = TicketTable(policy())
    _, kept = tickets.lease_tickets("a", 2, 0.0)
    tickets.reconcile_cell_report("a", [kept], [], 1.0)
    assert tickets.lease_tickets("a", 9, 1.0) == [TicketRef(0, 2)]
    assert tickets.get_state(kept.ticket_id) == "leased"


AHEAD = policy(offpolicyness=4)


def test_a_restarted_ledger_takes_a_ticket_sealed_twice_from_the_batch_that_used_it() -> None:
    first, again = settled(TicketRef(0, 1)), settled(TicketRef(0, 2))
    manifest = BatchManifest(1, 1, [again, settled(TicketRef(1, 1))])
    index = [first, again, settled(TicketRef(2, 1))]
    tickets = rebuilt(AHEAD, manifests=[manifest], settled=index)
    assert [tickets.get_state(i) for i in range(3)] == ["batched", "batched", "settled"]


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
