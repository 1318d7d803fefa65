from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.rollout.driver import LeasedTickets
from areal_hpc.wire.ledger import TicketGrant, TicketRef


def grant(ticket_id: int, n_samples: int = 4) -> TicketGrant:
    return TicketGrant(TicketRef(ticket_id, 0), ticket_id, 0, n_samples)


def test_slots_free_up_episode_by_episode_and_finished_tickets_are_reported() -> None:
    board = LeasedTickets(6, 4)
    assert board.hold_granted(grant(1))
    assert board.free_episode_slots == 2
    board.mark_episode_ended(grant(1).ref)
    assert board.free_episode_slots == 3
    board.mark_all_episodes_begun(grant(1))  # started over, it takes all its slots again
    assert board.free_episode_slots == 2
    board.hold_granted(grant(2))
    board.mark_finished(grant(1).ref)
    assert (board.held, board.finished) == ([grant(2).ref], [grant(1).ref])
    assert board.free_episode_slots == 2


def test_repeated_grant_is_run_once_but_a_dropped_ticket_is_forgotten() -> None:
    board = LeasedTickets(8, 4)
    for ticket, end in ((grant(1), board.mark_finished), (grant(2), board.stop_holding)):
        assert board.hold_granted(ticket)
        assert not board.hold_granted(ticket)
        end(ticket.ref)
    assert not board.hold_granted(grant(1))
    assert (board.held, board.finished, board.free_episode_slots) == ([], [grant(1).ref], 8)
    assert board.hold_granted(grant(2))


def test_a_finished_ticket_is_reported_until_the_ledger_wants_it_no_more() -> None:
    board = LeasedTickets(24, 4)
    for number in range(3):
        board.hold_granted(grant(number))
        board.mark_finished(grant(number).ref)
    board.forget_finished([grant(1).ref, grant(7).ref])
    assert [ref.ticket_id for ref in board.finished] == [0, 2]
    board.forget_finished(board.finished)
    assert board.finished == []


@given(st.lists(st.integers(1, 5), max_size=20))
def test_capacity_is_never_negative(sizes: list[int]) -> None:
    board = LeasedTickets(8, 4)
    for number, size in enumerate(sizes):
        board.hold_granted(grant(number, size))
        assert board.free_episode_slots == max(0, 8 - sum(sizes[: number + 1]))
