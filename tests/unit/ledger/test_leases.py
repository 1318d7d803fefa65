"""How often cells are to be heard of."""

from areal_hpc.ledger.leases import MAX_HEARTBEATS_PER_S, CellHeartbeats
from areal_hpc.wire.ledger import LeaseRequest, TicketRef


def cells_heard(count: int) -> CellHeartbeats:
    cells = CellHeartbeats()
    for number in range(count):
        cells.record(LeaseRequest(f"cell-{number}", 8), now_s=float(number))
    return cells


def test_many_cells_share_the_heartbeats_that_a_core_affords() -> None:
    cells = cells_heard(2 * MAX_HEARTBEATS_PER_S)
    assert len(cells) / cells.heartbeat_interval_s == MAX_HEARTBEATS_PER_S
    cells.forget_silent_cells(MAX_HEARTBEATS_PER_S)
    assert cells.heartbeat_interval_s == 1.0


def test_the_time_that_cells_report_no_ticket_is_added_up_and_handed_out_once() -> None:
    cells, held = CellHeartbeats(), [TicketRef(3, 1)]
    reports = [("a", 0.0, []), ("a", 2.0, []), ("a", 3.0, held), ("a", 9.0, []), ("b", 9.0, [])]
    for cell, now_s, tickets in reports:
        cells.record(LeaseRequest(cell, 8, held=tickets), now_s)
    assert cells.pop_idle_s() == 2.0
    cells.record(LeaseRequest("a", 8), 10.0)
    cells.record(LeaseRequest("b", 8), 10.5)
    assert cells.pop_idle_s() == 2.5
    cells.forget_silent_cells(100.0)
    cells.record(LeaseRequest("a", 8), 200.0)
    assert cells.pop_idle_s() == 0.0, "one that was away was not idle"
