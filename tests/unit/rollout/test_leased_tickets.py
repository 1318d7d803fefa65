from areal_hpc.rollout.driver import LeasedTickets
from areal_hpc.wire.ledger import TicketGrant, TicketRef


def grant(ticket_id: int, n_samples: int = 4) -> TicketGrant:
    return TicketGrant(TicketRef(ticket_id, 0), ticket_id, 0, n_samples)


def test_repeated_grant_is_run_once_but_a_dropped_ticket_is_forgotten() -> None:
    board = LeasedTickets(8, 4)
    for ticket, is_finished in ((grant(1), True), (grant(2), False)):
        assert board.hold(ticket)
        assert not board.hold(ticket)
        board.release(ticket.ref, is_finished=is_finished)
    assert not board.hold(grant(1))
    assert (board.held, board.finished, board.free_episode_slots) == ([], [grant(1).ref], 8)
    assert board.hold(grant(2))
