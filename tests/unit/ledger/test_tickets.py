"""Single situations of tickets: admission, leases, batches, held-out tasks, first failures."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from areal_hpc.errors import ClusterError
from areal_hpc.ledger.drop_stats import FirstTicketsCheck
from areal_hpc.ledger.evaluation import EvaluationSetPart, EvaluationState
from areal_hpc.ledger.leases import MAX_HEARTBEATS_PER_S, CellHeartbeats
from areal_hpc.ledger.tickets import (
    TicketCounts,
    TicketPolicy,
    TicketTable,
    count_admissible_tickets,
)
from areal_hpc.rundir.manifests import DropKind, DroppedTicket
from areal_hpc.wire.ledger import (
    BatchManifest,
    DropTicketRequest,
    IrregularTicketCounts,
    LeaseRequest,
    StaleGroupPolicy,
    TicketRef,
)
from areal_hpc.wire.weight_version import WeightVersion
from tests.unit.ledger.ticket_world import fill_batch, rebuilt, settled


def test_a_grant_whose_reply_was_lost_is_issued_again_at_once() -> None:
    """The cell lives and reports, but does not mention the ticket."""
    tickets = TicketTable(TicketPolicy(2, 0, 100, 10, cell_timeout_s=30.0))
    _, kept = tickets.lease_tickets("a", 2, 0.0)
    tickets.reconcile_cell_report("a", [kept], [], 1.0)
    assert tickets.lease_tickets("a", 9, 1.0) == [TicketRef(0, 2)]
    assert tickets.get_state(kept.ticket_id) == "leased"


@pytest.mark.parametrize(
    ("steps_and_tickets", "message"),
    [
        ([(2, 0)], "the manifest of step 1 is missing"),
        ([(1, 0), (3, 1)], "the manifest of step 2 is missing"),
        ([(1, 0), (1, 1)], "the manifest of step 2 is missing"),
        ([(1, 0), (2, 0)], "batches of steps 1 and 2"),
    ],
)
def test_gaps_are_refused(steps_and_tickets: list[tuple[int, int]], message: str) -> None:
    batches = [BatchManifest(step, 1, [settled(TicketRef(i, 1))]) for step, i in steps_and_tickets]
    with pytest.raises(ClusterError, match=message):
        rebuilt(TicketPolicy(2, 4, 100, 10, cell_timeout_s=30.0), manifests=batches)


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


def evaluate(step: int, n_tasks: int) -> EvaluationState:
    return EvaluationState(step, {"valid": EvaluationSetPart(0, n_tasks)})


def test_a_task_is_leased_again_when_its_cell_is_silent_or_does_not_report_it() -> None:
    """The reply that granted it was lost, or the driver was restarted."""
    evaluation = evaluate(step=0, n_tasks=3)
    (lost,) = evaluation.lease_tickets("a", 1, 0.0)
    kept, unreported = evaluation.lease_tickets("b", 2, 0.0)
    evaluation.reconcile_cell_report("b", [kept], 20.0)
    assert evaluation.lease_tickets("b", 3, 20.0) == [TicketRef(unreported.ticket_id, 2, 0)]
    assert evaluation.expire_leases(10.0) == 1
    assert evaluation.lease_tickets("b", 3, 20.0) == [TicketRef(lost.ticket_id, 2, 0)]


def test_tasks_with_the_same_rewards_in_another_order_have_the_same_mean() -> None:
    evaluation = EvaluationState(0, {"aime": EvaluationSetPart(1, 2, n_samples=3)})
    first, second = evaluation.lease_tickets("a", 6, 0.0)
    assert evaluation.record_rewards(first, [0.1, 0.2, 0.3])
    assert evaluation.record_rewards(second, [0.3, 0.2, 0.1])
    ((_, result),) = evaluation.build_unwritten_results()
    assert result.rewards[0] == result.rewards[1]


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


small = st.integers(0, 30)
policies = st.builds(
    TicketPolicy,
    batch_size=st.integers(1, 8),
    max_head_offpolicyness=st.integers(0, 4),
    max_concurrent_tickets=st.integers(1, 12),
    total_steps=st.integers(1, 6),
    cell_timeout_s=st.just(30.0),
)
counts = st.builds(
    TicketCounts,
    leased=small,
    awaiting_seal=small,
    settled=small,
    in_unpublished_batches=small,
    formed_batches=st.integers(0, 6),
)


def outstanding(now: TicketCounts) -> int:
    return now.held_by_cells + now.settled + now.in_unpublished_batches


@given(policies, counts)
def test_grants_keep_bounds_that_one_more_breaks(policy: TicketPolicy, now: TicketCounts) -> None:
    """Admission holds nothing back without a reason."""
    assume(now.formed_batches <= policy.total_steps)

    def keeps_bounds(more: int) -> bool:
        after = replace(now, leased=now.leased + more)
        needed = (policy.total_steps - now.formed_batches) * policy.batch_size
        return (
            after.leased <= policy.max_concurrent_tickets
            and outstanding(after) <= (policy.max_head_offpolicyness + 1) * policy.batch_size
            and after.held_by_cells + after.settled <= needed
        )

    granted = count_admissible_tickets(policy, now)
    assert granted >= 0
    assert granted == 0 or keeps_bounds(granted)
    assert not keeps_bounds(granted + 1)


def tickets_of(
    stale_groups: StaleGroupPolicy = "train_with_correction", bound: int = 1
) -> TicketTable:
    return TicketTable(TicketPolicy(2, bound, 100, 50, 30.0, stale_groups))


def train(tickets: TicketTable, steps: int) -> None:
    """Train batches of fresh tickets while one ticket (the first leased) is under way."""
    for _ in range(steps):
        manifest = fill_batch(tickets)
        assert manifest.counts == IrregularTicketCounts()
        tickets.set_version_step(manifest.step)


def overtaken(stale_groups: StaleGroupPolicy, steps: int) -> tuple[TicketTable, TicketRef]:
    """Settle a ticket sampled by version 1.0 after `steps` batches are trained."""
    tickets = tickets_of(stale_groups)
    ref = tickets.lease_tickets("a", 1, 0.0)[0]
    train(tickets, steps)
    tickets.settle(settled(ref, WeightVersion(1, 0)))
    return tickets, ref


@pytest.mark.parametrize(
    ("policy", "steps", "state", "trained_attempt", "counts"),
    [
        ("drop", 1, "settled", 1, IrregularTicketCounts()),
        ("train_with_correction", 2, "settled", 1, IrregularTicketCounts(stale_trained=1)),
        ("drop", 2, "dropped", None, IrregularTicketCounts(stale_dropped=1)),
    ],
)
def test_a_group_beyond_the_bound_is_trained_or_dropped_as_the_recipe_says(
    policy: StaleGroupPolicy,
    steps: int,
    state: str,
    trained_attempt: int | None,
    counts: IrregularTicketCounts,
) -> None:
    tickets, ref = overtaken(policy, steps)
    for drop in tickets.find_stale_tickets(1, ()):
        assert (drop.ref, drop.reason) == (ref, "sampled 2 steps ago; the limit is 1")
        tickets.drop_settled_ticket(drop)
    assert tickets.get_state(ref.ticket_id) == state
    manifest = fill_batch(tickets)
    first, _ = (ticket.ref for ticket in manifest.tickets)
    assert (first.ticket_id == ref.ticket_id) == (trained_attempt is not None)
    assert trained_attempt in (first.attempt, None)
    assert manifest.counts == counts


@pytest.mark.parametrize(("kind", "text"), [("filtered", "filtered out"), ("stale", "as stale")])
def test_setbacks_without_end_are_an_error_that_names_the_key(kind: DropKind, text: str) -> None:
    tickets = tickets_of()
    for number in range(100):
        assert tickets.drop_stats.find_problem() == ""
        tickets.drop_stats.record_drop(DroppedTicket(TicketRef(number, 1), "all 0.0", kind))
    trouble = tickets.drop_stats.find_problem()
    assert all(part in trouble for part in (text, "rollout.", "all 0.0"))


@given(st.permutations(range(12)), st.lists(st.integers(0, 11), max_size=4))
def test_the_same_arrivals_give_the_same_batches(order: list[int], failures: list[int]) -> None:
    """A ledger that lived through them and one that reads the index of one writer agree."""
    policy = TicketPolicy(2, 20, 100, 20, 30.0)
    living = TicketTable(policy)
    refs = living.lease_tickets("a", 12, 0.0)
    arrivals, drops, formed = [], [], []
    for number in order:
        if number in failures:
            drops.append(DroppedTicket(refs[number], "it raised"))
            living.drop(drops[-1])
            continue
        arrivals.append(settled(refs[number], WeightVersion(1, 0)))
        living.settle(arrivals[-1])
        while manifest := living.build_next_batch(generation=1):
            living.record_batch(manifest)
            formed.append([ticket.ref for ticket in manifest.tickets])
    replayed = rebuilt(policy, dropped=drops, settled=arrivals)
    again = []
    while manifest := replayed.build_next_batch(generation=1):
        replayed.record_batch(manifest)
        again.append([ticket.ref for ticket in manifest.tickets])
    assert again == formed
