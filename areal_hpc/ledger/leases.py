"""Who holds which ticket, and when it was last heard of. Pure: time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class Lease:
    """One ticket in the hands of one cell."""

    cell: str
    attempt: int
    newest_attempt: int
    """Highest attempt ever issued of the ticket: the next issue must go above it."""
    seen_at_s: float
    """When the cell last reported it."""


class LeaseTable:
    """Leases by ticket id, kept in the order they were last reported. Every call is O(1)."""

    def __init__(self) -> None:
        self._leases: OrderedDict[int, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, ticket_id: object) -> bool:
        return ticket_id in self._leases

    def add(self, ticket_id: int, lease: Lease) -> None:
        """Note a lease reported just now."""
        self._leases[ticket_id] = lease
        self._leases.move_to_end(ticket_id)

    def touch(self, ticket_id: int, cell: str, attempt: int, now_s: float) -> bool:
        """Refresh the lease if it is this cell's and this attempt's; else return False."""
        lease = self._leases.get(ticket_id)
        if lease is None or lease.attempt != attempt or lease.cell != cell:
            return False
        lease.seen_at_s = now_s
        self._leases.move_to_end(ticket_id)
        return True

    def get(self, ticket_id: int) -> Lease | None:
        """The lease of a ticket, if it has one."""
        return self._leases.get(ticket_id)

    def pop(self, ticket_id: int) -> Lease | None:
        """Remove and return the lease, if there is one."""
        return self._leases.pop(ticket_id, None)

    def pop_silent(self, before_s: float) -> list[tuple[int, Lease]]:
        """Remove every lease last reported before `before_s`, longest silent first."""
        silent: list[tuple[int, Lease]] = []
        while self._leases:
            ticket_id, lease = next(iter(self._leases.items()))
            if lease.seen_at_s >= before_s:
                break
            silent.append((ticket_id, lease))
            self._leases.popitem(last=False)
        return silent
