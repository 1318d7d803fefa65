"""Admission control: the number of tickets that may be leased now, from their states. Pure.

The rule is that of AReaL (arXiv 2505.24298, section 5.1; `areal/infra/staleness_manager.py`).
Every count is that of a state in which tickets are now, none that of an event: a ticket that was
dropped or filtered, or that waits to be issued again, is in no count and takes room from nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_hpc.wire.ledger import StaleGroupPolicy


@dataclass(frozen=True, slots=True)
class TicketCounts:
    """Numbers of tickets by state (`tickets.py` has the states), and of batches handed out."""

    leased: int
    awaiting_seal: int
    settled: int
    in_unpublished_batches: int
    formed_batches: int

    @property
    def held_by_cells(self) -> int:
        return self.leased + self.awaiting_seal


def count_admissible_tickets(policy: TicketPolicy, counts: TicketCounts) -> int:
    """Number of tickets that may be leased now; never negative.

    The least of three limits:

    - concurrency: tickets running;
    - staleness: a ticket leased at version v joins a batch no later than v + 1 +
      max_head_offpolicyness if tickets settle in the order of their leases, so 0 is exactly
      synchronous; one that takes longer keeps its place, which slows the others down;
    - need: what the remaining steps still lack.
    """
    unbatched = counts.held_by_cells + counts.settled
    concurrency = policy.max_concurrent_tickets - counts.leased
    ahead = (policy.max_head_offpolicyness + 1) * policy.batch_size
    staleness = ahead - unbatched - counts.in_unpublished_batches
    need = (policy.total_steps - counts.formed_batches) * policy.batch_size - unbatched
    return max(0, min(concurrency, staleness, need))


@dataclass(frozen=True, slots=True)
class TicketPolicy:
    """Limits of admission. Sizes count tickets, not episodes."""

    batch_size: int
    max_head_offpolicyness: int
    max_concurrent_tickets: int
    total_steps: int
    cell_timeout_s: float
    stale_groups: StaleGroupPolicy = "train_with_correction"

    @property
    def max_unrecorded_tickets(self) -> int:
        """More tickets than an earlier start of the ledger can have issued that left no trace.

        Its own limits may have been ten times these; ids beyond were made up.
        """
        return 1000 + 10 * (self.max_head_offpolicyness + 1) * self.batch_size

    @property
    def expected_report_interval_s(self) -> float:
        return self.cell_timeout_s / 3
