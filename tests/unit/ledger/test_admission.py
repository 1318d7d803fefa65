from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from areal_hpc.ledger.admission import TicketCounts, TicketPolicy, count_admissible_tickets

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
def test_what_is_granted_keeps_every_bound_and_one_ticket_more_would_break_one(
    policy: TicketPolicy, now: TicketCounts
) -> None:
    """Nothing is held back without a reason."""
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
