"""Tickets leased by a driver, and its free capacity."""

import asyncio
from collections.abc import Iterable

from areal_hpc.wire.ledger import TicketGrant, TicketRef


class LeasedTickets:
    """The driver's side of the leases.

    A cell with fewer slots than a training ticket has episodes could never start one, and gets as
    many.
    """

    def __init__(self, episode_slots: int, episodes_per_ticket: int) -> None:
        self._slots = max(episode_slots, episodes_per_ticket)
        self._episodes_per_ticket = episodes_per_ticket
        self.changed = asyncio.Event()
        """Set when a ticket ends, or there is room for a further one."""
        self._open_episodes: dict[TicketRef, int] = {}
        self._begun_episodes: dict[TicketRef, int] = {}
        self._finished: dict[TicketRef, None] = {}  # in order

    @property
    def free_episode_slots(self) -> int:
        return max(0, self._slots - sum(self._open_episodes.values()))

    @property
    def has_no_open_episodes(self) -> bool:
        return not any(self._open_episodes.values())

    @property
    def ended_episodes_of_open_tickets(self) -> int:
        """Episodes that are over, of training tickets that are not."""
        return sum(
            begun - self._open_episodes[ref]
            for ref, begun in self._begun_episodes.items()
            if ref.eval_step < 0
        )

    @property
    def held(self) -> list[TicketRef]:
        return list(self._open_episodes)

    @property
    def finished(self) -> list[TicketRef]:
        """Training tickets that ended and, as far as is known here, are not settled.

        Reported until the ledger says otherwise: one that restarted knows nothing of them.
        """
        return list(self._finished)

    def hold_granted(self, ticket_grant: TicketGrant) -> bool:
        """Hold a granted ticket. False if it is here already (the grant was repeated)."""
        if ticket_grant.ref in self._open_episodes or ticket_grant.ref in self._finished:
            return False
        self.mark_all_episodes_begun(ticket_grant)
        return True

    def mark_all_episodes_begun(self, ticket_grant: TicketGrant) -> None:
        self._open_episodes[ticket_grant.ref] = self._begun_episodes[ticket_grant.ref] = (
            ticket_grant.n_episodes
        )

    def mark_episode_ended(self, ref: TicketRef) -> None:
        self._open_episodes[ref] -= 1
        if self.free_episode_slots >= self._episodes_per_ticket:
            self.changed.set()

    def mark_finished(self, ref: TicketRef) -> None:
        self.stop_holding(ref)
        self._finished[ref] = None

    def forget_finished(self, refs: Iterable[TicketRef]) -> None:
        for ref in refs:
            self._finished.pop(ref, None)

    def stop_holding(self, ref: TicketRef) -> None:
        del self._open_episodes[ref], self._begun_episodes[ref]
        self.changed.set()
