import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.ledger.admission import TicketPolicy
from areal_hpc.ledger.batch_formation import StalenessCheck, build_next_batch_manifest
from areal_hpc.ledger.tickets import TicketTable
from areal_hpc.rundir.manifests import DropKind, DroppedTicket
from areal_hpc.wire.ledger import IrregularTicketCounts, StaleGroupPolicy, TicketRef
from areal_hpc.wire.weight_version import WeightVersion
from tests.unit.ledger.ticket_world import fill_batch, rebuilt, settled


def tickets_of(
    stale_groups: StaleGroupPolicy = "train_with_correction", bound: int = 1
) -> TicketTable:
    return TicketTable(TicketPolicy(2, bound, 100, 50, 30.0, stale_groups))


def train(tickets: TicketTable, steps: int) -> None:
    """Batches of fresh tickets, while one ticket (the first leased) is under way."""
    for _ in range(steps):
        manifest = fill_batch(tickets)
        assert manifest.counts == IrregularTicketCounts()
        tickets.set_version_step(manifest.step)


def overtaken(stale_groups: StaleGroupPolicy, steps: int) -> tuple[TicketTable, TicketRef]:
    """A ticket sampled by version 1.0 settles when `steps` batches are trained."""
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
    for drop in StalenessCheck().find_stale_tickets_to_drop(tickets, 1, ()):
        assert (drop.ref, drop.reason) == (ref, "sampled 2 steps ago; the limit is 1")
        tickets.drop_settled_ticket(drop)
    assert tickets.get_state(ref.ticket_id) == state
    manifest = fill_batch(tickets)
    first, _ = (ticket.ref for ticket in manifest.tickets)
    assert (first.ticket_id == ref.ticket_id) == (trained_attempt is not None)
    assert trained_attempt in (first.attempt, None)
    assert manifest.counts == counts


@pytest.mark.parametrize(("kind", "said"), [("filtered", "filtered out"), ("stale", "as stale")])
def test_setbacks_without_end_are_an_error_that_names_the_key(kind: DropKind, said: str) -> None:
    tickets = tickets_of()
    for number in range(100):
        assert tickets.drop_stats.find_problem() == ""
        tickets.drop_stats.record_drop(DroppedTicket(TicketRef(number, 1), "all 0.0", kind))
    trouble = tickets.drop_stats.find_problem()
    assert all(part in trouble for part in (said, "rollout.", "all 0.0"))


@given(st.permutations(range(12)), st.lists(st.integers(0, 11), max_size=4))
def test_the_same_arrivals_give_the_same_batches(order: list[int], failures: list[int]) -> None:
    """Whatever the ledger: one that lived through it, or one that reads the index of one writer."""
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
        while manifest := build_next_batch_manifest(living, generation=1):
            living.record_batch(manifest)
            formed.append([ticket.ref for ticket in manifest.tickets])
    replayed = rebuilt(policy, dropped=drops, settled=arrivals)
    again = []
    while manifest := build_next_batch_manifest(replayed, generation=1):
        replayed.record_batch(manifest)
        again.append([ticket.ref for ticket in manifest.tickets])
    assert again == formed
