"""Episode slots for external programs (online mode)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from areal_hpc.errors import RequestError
from areal_hpc.wire.proxy import OfferEpisodeRequest

MAX_WAIT_S = 60.0


@dataclass(slots=True, eq=False)
class EpisodeSlot:
    """One episode's place, until a program takes it or its driver asks anew."""

    request: OfferEpisodeRequest
    taken: asyncio.Future[str] = field(default_factory=asyncio.Future)
    """The id of the session."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Older tickets first, so that groups become complete."""
        session = self.request.session
        ref = session.ref
        return (ref.ticket_id, ref.attempt, session.episode) if ref else (0, 0, session.episode)


class OnlineSlots:
    """The places that are free."""

    def __init__(self) -> None:
        self._free: set[EpisodeSlot] = set()

    async def offer(self, request: OfferEpisodeRequest) -> str | None:
        """The session of the program that came; None if nobody did in time."""
        offer = EpisodeSlot(request)
        self._free.add(offer)
        try:
            async with asyncio.timeout(min(request.wait_s, MAX_WAIT_S)):
                return await offer.taken
        except TimeoutError:
            return None
        finally:
            self._free.discard(offer)

    def take(self) -> EpisodeSlot:
        """The place that a program gets. Its `taken` must be told the session.

        Raises:
            RequestError: (429) The run needs no episode at the moment.
        """
        free = [offer for offer in self._free if not offer.taken.done()]  # its driver has gone
        if not free:
            raise RequestError(
                429, "no episode is waiting for an external program now", hint="repeat the request"
            )
        offer = min(free, key=lambda one: one.rank)
        self._free.discard(offer)
        return offer
