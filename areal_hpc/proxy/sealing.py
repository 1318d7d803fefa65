"""Finished tickets -> sealed shards -> settled at the ledger, whatever dies in between.

A ticket is finished in the journal, then sealed in a shard with an index line, then noted as
sealed in the journal, then settled. A proxy that dies between the middle two finds its shard
in the index when it starts again, so that no ticket is sealed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from areal_hpc.cluster import rendezvous
from areal_hpc.errors import ClusterError
from areal_hpc.layout import RunLayout
from areal_hpc.proxy.events import TicketsSealed, TicketsSettled
from areal_hpc.proxy.recorder import Recorder
from areal_hpc.proxy.sessions import FinishedTicket
from areal_hpc.shards.config import ShardConfig
from areal_hpc.shards.index import ShardTicket, locate_tickets, read_index
from areal_hpc.shards.verify import repair
from areal_hpc.shards.writer import seal
from areal_hpc.wire.http import AsyncWireClient
from areal_hpc.wire.ledger import Acknowledged, SettledTicket, SettleRequest, TicketRef

log = logging.getLogger(__name__)

CHECK_S = 0.2
SHORTEST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0
LEDGER_TIMEOUT_S = 10.0


class Sealer:
    """Seals by bytes, by age, or when asked; settles until the ledger acknowledges."""

    def __init__(
        self,
        recorder: Recorder,
        layout: RunLayout,
        cell: str,
        config: ShardConfig,
        admin_key: str,
    ) -> None:
        self._recorder = recorder
        self._book = recorder.book
        self._layout = layout
        self._cell = cell
        self._config = config
        self._admin_key = admin_key
        self._ledger: AsyncWireClient | None = None
        self._ledger_url = ""
        self._sealing = asyncio.Lock()
        self._settling = asyncio.Lock()
        self._look = asyncio.Event()
        self._backoff_s = SHORTEST_BACKOFF_S
        self._not_before = 0.0

    def recover(self) -> None:
        """Note tickets that an earlier proxy sealed but could not note, nor perhaps index."""
        repair(self._layout, self._cell)
        indexed = locate_tickets(read_index(self._layout.index_dir, self._cell))
        found = [
            _settled(ref, *indexed[ref.ticket_id, ref.attempt])
            for ref in self._book.finished
            if (ref.ticket_id, ref.attempt) in indexed
        ]
        if found:
            log.info("%d tickets were sealed before the restart", len(found))
            self._recorder.record(TicketsSealed(found))

    def wake(self) -> None:
        """Look now whether something must be sealed."""
        self._look.set()

    async def run(self) -> None:
        """Seal and settle until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), CHECK_S)
            self._look.clear()
            if time.monotonic() < self._not_before:
                continue
            try:
                if self._is_due():
                    await self._seal()
                await self._settle()
                self._backoff_s = SHORTEST_BACKOFF_S
            except ClusterError as error:
                log.warning("again in %.1f s: %s", self._backoff_s, error)
                self._not_before = time.monotonic() + self._backoff_s
                self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)

    async def seal_now(self) -> int:
        """Seal what is finished, settle it if the ledger answers; how many tickets were sealed.

        Raises:
            ClusterError: The storage refused.
        """
        count = await self._seal()
        try:
            await self._settle()
        except ClusterError as error:
            log.warning("sealed, will be settled later: %s", error)
        return count

    def _is_due(self) -> bool:
        finished = self._book.finished.values()
        if not finished:
            return False
        oldest_at = min(ticket.finished_at for ticket in finished)
        held_bytes = sum(ticket.row_bytes for ticket in finished)
        return (
            held_bytes >= self._config.target_bytes
            or time.time() - oldest_at >= self._config.seal_after_s
        )

    async def _seal(self) -> int:
        async with self._sealing:
            tickets = list(self._book.finished.values())
            if not tickets:
                return 0
            settled = await asyncio.to_thread(self._write, tickets)
            self._recorder.record(TicketsSealed(settled))
            return len(settled)

    def _write(self, tickets: Sequence[FinishedTicket]) -> list[SettledTicket]:
        """Runs in a thread: nothing changes in a finished ticket."""
        rows = [row for ticket in tickets for row in ticket.rows()]
        began = time.monotonic()
        shard = seal(rows, self._layout.shards_dir, self._layout.index_dir, self._cell)
        log.info(
            "sealed %d tickets, %d rows, %d tokens as %s in %.3f s",
            len(tickets),
            shard.rows,
            shard.tokens,
            shard.file,
            time.monotonic() - began,
        )
        places = {(one.ticket_id, one.attempt): one for one in shard.tickets}
        return [
            _settled(ticket.ref, shard.file, places[ticket.ref.ticket_id, ticket.ref.attempt])
            for ticket in tickets
        ]

    async def _settle(self) -> None:
        async with self._settling:
            tickets = list(self._book.sealed.values())
            if not tickets:
                return
            client = await self._client()
            await client.call("/settle", SettleRequest(self._cell, tickets), Acknowledged)
            self._recorder.record(TicketsSettled([ticket.ref for ticket in tickets]))
            await self._recorder.tidy()

    async def _client(self) -> AsyncWireClient:
        endpoint = rendezvous.find(self._layout.rendezvous_dir, "ledger")
        if endpoint is None:
            raise ClusterError("the ledger has not been published")
        if self._ledger is None or endpoint.url != self._ledger_url:
            await self.close()
            self._ledger_url = endpoint.url
            self._ledger = AsyncWireClient(
                endpoint.url, self._admin_key, timeout_s=LEDGER_TIMEOUT_S
            )
        return self._ledger

    async def close(self) -> None:
        """Close pooled connections."""
        if self._ledger is not None:
            await self._ledger.close()
            self._ledger = None


def _settled(ref: TicketRef, shard: str, place: ShardTicket) -> SettledTicket:
    return SettledTicket(ref, shard, place.rows, place.rewards, place.oldest_version)
