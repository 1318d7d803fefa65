"""An agent that fails in all of its first tickets alike ends the run; any other does not."""

import pytest

from areal_hpc.ledger.drop_stats import FirstTicketsCheck
from areal_hpc.wire.ledger import DropTicketRequest, TicketRef

CAUSE = "KeyError at /a.py:3"


def drop(ticket_id: int, cause: str = CAUSE, eval_step: int = -1) -> DropTicketRequest:
    ref = TicketRef(ticket_id, 1, eval_step)
    return DropTicketRequest("cell-0", ref, f"ticket {ticket_id} raised", cause=cause)


@pytest.mark.parametrize("eval_step", [-1, 0])
def test_three_first_tickets_that_fail_alike_are_a_problem(eval_step: int) -> None:
    check = FirstTicketsCheck()
    for ticket_id in (0, 1, 1):
        check.record_failure(drop(ticket_id, eval_step=eval_step))
        assert check.find_problem() == "", "a repeated report counts once"
    check.record_failure(drop(2, eval_step=eval_step))
    problem = check.find_problem()
    assert "failed alike in the first 3 tickets" in problem
    assert "ticket 2 raised" in problem


@pytest.mark.parametrize("works", ["a success", "another cause"])
def test_an_agent_that_does_not_always_fail_alike_goes_on(works: str) -> None:
    check = FirstTicketsCheck()
    check.record_failure(drop(0))
    if works == "a success":
        check.record_success(TicketRef(9, 1))
    else:
        check.record_failure(drop(9, cause="ValueError at /a.py:7"))
    for ticket_id in (1, 2, 3, 4):
        check.record_failure(drop(ticket_id))
    assert check.find_problem() == ""


def test_the_evaluations_agent_is_judged_by_itself_and_a_seal_that_failed_is_nobodys() -> None:
    check = FirstTicketsCheck()
    check.record_success(TicketRef(0, 1, 0))
    for ticket_id in (0, 1):
        check.record_failure(drop(ticket_id))
    check.record_failure(drop(5, cause=""))
    check.record_failure(drop(3, eval_step=0))
    assert check.find_problem() == ""
    check.record_failure(drop(2))
    assert check.find_problem()
