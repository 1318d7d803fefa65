"""Sealer: finished tickets into shards, then settled with the ledger.

A ticket is finished in the journal, then sealed in a shard with an index line, then noted as
sealed in the journal, then settled. A proxy that dies between the middle two finds its shard
in the index when it starts again, so that no ticket is sealed twice.

A ticket that cannot become sound rows is dropped with the reason, in the journal and then at the
ledger, which issues another one in its place.

Held-out tickets and failed episodes go into shards of their own (`untrained`), which hold nothing
that the trainer waits for and that the ledger must know.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence

from areal_hpc.errors import ClusterError
from areal_hpc.proxy.sessions.events import TicketDropped, TicketsAcknowledged, TicketsSealed
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.store import FinishedTicket
from areal_hpc.proxy.sessions.untrained import UntrainedSealer
from areal_hpc.recipe.sections.proxy_and_shards import ShardConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import LEDGER_SERVICE
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.spans import time_span
from areal_hpc.shards.index import ShardTicket, locate_tickets, read_index
from areal_hpc.shards.verify import repair_index_and_remove_partial_shards
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropTicketRequest,
    SealedTicket,
    SettleTicketsRequest,
    TicketRef,
)
from areal_hpc.wire.retry import Backoff
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow, find_row_defect

log = logging.getLogger(__name__)

CHECK_PERIOD_S = 0.2
BACKOFF = Backoff(0.2, 5.0)
LEDGER_TIMEOUT_S = 10.0


class TicketSealer:
    """Seals by bytes, by age, or when asked; settles until the ledger acknowledges."""

    def __init__(
        self,
        recorder: JournaledRecorder,
        paths: RunPaths,
        cell: str,
        config: ShardConfig,
        service_key: str,
    ) -> None:
        self._recorder = recorder
        self._store = recorder.store
        self._paths = paths
        self._cell = cell
        self._config = config
        self._ledger = AsyncServiceClient(
            paths.rendezvous_dir, LEDGER_SERVICE, service_key, timeout_s=LEDGER_TIMEOUT_S
        )
        self.untrained = UntrainedSealer(recorder, paths, cell, config)
        self._sealing = asyncio.Lock()
        self._settling = asyncio.Lock()
        self._seal_task: asyncio.Future[int] | None = None
        self._wake_up = asyncio.Event()
        self._not_before = 0.0

    def recover_interrupted_seals(self) -> None:
        """Note what an earlier proxy sealed but could not note, nor perhaps index."""
        repair_index_and_remove_partial_shards(self._paths, self._cell)
        shards = read_index(self._paths.shard_index_dir, self._cell)
        self.untrained.record_already_sealed(shards)
        indexed = locate_tickets(shards)
        found = [
            _build_sealed_ticket(ref, *indexed[ref.ticket_id, ref.attempt])
            for ref, ticket in self._store.finished.items()
            if not ticket.is_evaluation and (ref.ticket_id, ref.attempt) in indexed
        ]
        if found:
            log.info("%d tickets had been sealed before the restart", len(found))
            self._recorder.journal_and_apply(TicketsSealed(found))

    def wake(self) -> None:
        self._wake_up.set()

    async def run(self) -> None:
        pauses = iter(BACKOFF)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake_up.wait(), CHECK_PERIOD_S)
            self._wake_up.clear()
            if time.monotonic() < self._not_before:
                continue
            try:
                if self._is_seal_due():
                    await self._seal_training_tickets()
                await self.untrained.seal_if_due()
                await self._settle_with_ledger_and_journal()
                pauses = iter(BACKOFF)
            except (ClusterError, OSError) as error:  # too many open files is a reason to wait
                pause_s = next(pauses)
                log.warning("sealing or settling failed, next try in %.1f s: %s", pause_s, error)
                self._not_before = time.monotonic() + pause_s

    async def seal_training_tickets_and_settle(self) -> int:
        """Seal what is finished, settle it if the ledger answers; how many tickets were sealed."""
        count = await self._seal_training_tickets()
        await self._report_to_ledger_or_log()
        return count

    async def _report_to_ledger_or_log(self) -> None:
        try:
            await self._settle_with_ledger_and_journal()
        except ClusterError as error:
            log.warning("sealed; settling with the ledger failed and will be retried: %s", error)

    async def seal_all_and_settle(self) -> None:
        """Seal what is finished, what the trainer waits for first."""
        await self._seal_training_tickets()
        await self.untrained.seal_now()
        await self._report_to_ledger_or_log()

    def _list_finished_training_tickets(self) -> list[FinishedTicket]:
        return [one for one in self._store.finished.values() if not one.is_evaluation]

    def _is_seal_due(self) -> bool:
        finished = self._list_finished_training_tickets()
        if not finished:
            return False
        oldest_at = min(ticket.finished_at for ticket in finished)
        held_bytes = sum(ticket.row_bytes for ticket in finished)
        return (
            held_bytes >= self._config.target_bytes
            or time.time() - oldest_at >= self._config.seal_after_s
        )

    async def _seal_training_tickets(self) -> int:
        self._seal_task = asyncio.ensure_future(self._seal_or_drop_training_tickets())
        return await asyncio.shield(self._seal_task)

    async def _seal_or_drop_training_tickets(self) -> int:
        async with self._sealing:
            tickets = self._list_finished_training_tickets()
            if not tickets:
                return 0
            rows_of, defects = await asyncio.to_thread(_build_rows, tickets, self._cell)
            for ref, defect in defects.items():
                log.error("%s is dropped, for it cannot be sealed: %s", ref, defect)
                self._recorder.journal_and_apply(TicketDropped(ref, f"cannot be sealed: {defect}"))
            if not rows_of:
                return 0
            settled = await asyncio.to_thread(self._write_shard, rows_of)
            self._recorder.journal_and_apply(TicketsSealed(settled))
            return len(settled)

    def _write_shard(
        self, rows_of: Mapping[TicketRef, Sequence[TrajectoryRow]]
    ) -> list[SealedTicket]:
        """Runs in a thread: nothing changes in a finished ticket."""
        rows = [row for found in rows_of.values() for row in found]
        began = time.monotonic()
        with time_span("seal", "shards", rows=len(rows)) as facts:
            shard = write_sealed_shard(
                rows, self._paths.shards_dir, self._paths.shard_index_dir, self._cell
            )
            facts["shard"] = shard.file
        log.info(
            "sealed %d tickets, %d rows, %d tokens as %s in %.3f s",
            len(rows_of),
            shard.rows,
            shard.tokens,
            shard.file,
            time.monotonic() - began,
        )
        places = {(one.ticket_id, one.attempt): one for one in shard.tickets}
        return [
            _build_sealed_ticket(ref, shard.file, places[ref.ticket_id, ref.attempt])
            for ref in rows_of
        ]

    async def _settle_with_ledger_and_journal(self) -> None:
        async with self._settling:
            tickets, dropped = list(self._store.sealed.values()), dict(self._store.dropped)
            if not (tickets or dropped):
                return
            self._ledger.look_up()
            if tickets:
                settle = SettleTicketsRequest(self._cell, tickets)
                await self._ledger.call("/settle", settle, Acknowledged)
            for ref, reason in dropped.items():
                drop = DropTicketRequest(self._cell, ref, reason)
                await self._ledger.call("/drop", drop, Acknowledged)
            self._recorder.journal_and_apply(
                TicketsAcknowledged([*(one.ref for one in tickets), *dropped])
            )
            await self._recorder.compact_if_due()

    async def close(self) -> None:
        await self._ledger.close()


def _build_rows(
    tickets: Sequence[FinishedTicket], cell: str
) -> tuple[dict[TicketRef, list[TrajectoryRow]], dict[TicketRef, str]]:
    rows_of: dict[TicketRef, list[TrajectoryRow]] = {}
    defects: dict[TicketRef, str] = {}
    for ticket in tickets:
        rows, defect = [], ticket.defect
        if not defect:
            try:
                rows = ticket.build_rows(cell)
                defect = next(filter(None, map(find_row_defect, rows)), "")
            except Exception as error:  # boundary: one ticket must not end the cell; it is dropped
                log.exception("the rows of %s cannot be built", ticket.ref)
                defect = repr(error)
        if any(row.kind is RowKind.TRAIN for row in rows) and not defect:
            rows_of[ticket.ref] = rows
        else:
            defects[ticket.ref] = defect or "none of its calls is trained"
    return rows_of, defects


def _build_sealed_ticket(ref: TicketRef, shard: str, shard_ticket: ShardTicket) -> SealedTicket:
    return SealedTicket(
        ref, shard, shard_ticket.rows, shard_ticket.rewards, shard_ticket.oldest_version
    )
