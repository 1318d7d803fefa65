"""What the admission of tickets depends on."""

from __future__ import annotations

from dataclasses import dataclass

from areal_hpc.wire.ledger import StaleGroups


@dataclass(frozen=True, slots=True)
class TicketPolicy:
    """What admission depends on. Sizes count tickets, not episodes."""

    batch_size: int
    max_head_offpolicyness: int
    max_concurrent_tickets: int
    total_steps: int
    cell_timeout_s: float
    stale_groups: StaleGroups = "train_with_correction"

    @property
    def report_within_s(self) -> float:
        """A live cell reports at least this often; the rest of the timeout is slack."""
        return self.cell_timeout_s / 3
