"""How often cells are to be heard of."""

from areal_hpc.ledger.leases import MAX_HEARTBEATS_PER_S, CellHeartbeats
from areal_hpc.wire.ledger import LeaseRequest


def cells_heard(count: int) -> CellHeartbeats:
    cells = CellHeartbeats()
    for number in range(count):
        cells.record(LeaseRequest(f"cell-{number}", 8), now_s=float(number))
    return cells


def test_few_cells_ask_four_times_a_second() -> None:
    assert (
        cells_heard(1).heartbeat_interval_s
        == cells_heard(MAX_HEARTBEATS_PER_S // 4).heartbeat_interval_s
        == 0.25
    )


def test_many_cells_share_the_heartbeats_that_a_core_affords() -> None:
    cells = cells_heard(2 * MAX_HEARTBEATS_PER_S)
    assert len(cells) / cells.heartbeat_interval_s == MAX_HEARTBEATS_PER_S
    cells.drop_silent(MAX_HEARTBEATS_PER_S)
    assert cells.heartbeat_interval_s == 1.0
