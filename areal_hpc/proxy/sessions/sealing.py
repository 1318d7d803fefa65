"""Sealer, which writes finished tickets into shards and settles them with the ledger.

A ticket is finished in the journal, then sealed in a shard with an index line, then recorded as
sealed in the journal, then settled. A proxy that dies between the middle two finds its shard
in the index when it starts again, so that no ticket is sealed twice.

A ticket that cannot become sound rows is dropped with the reason, in the journal and then at the
ledger, which issues another one in its place.

Held-out tickets, failed episodes and what people played beside the tickets go into shards of their
own: the trainer does not wait for these, and the ledger does not get them.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from areal_hpc.errors import ClusterError
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.store import (
    FinishedTicket,
    Session,
    SessionDropped,
    SessionFailed,
    TicketDropped,
    TicketsAcknowledged,
    TicketsSealed,
    UntrainedSealed,
)
from areal_hpc.recipe.sections.inference import ShardConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import LEDGER_SERVICE
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.spans import time_span
from areal_hpc.shards.index import SealedShard, locate_tickets, read_index
from areal_hpc.shards.verify import repair_index
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropTicketRequest,
    SettleShardsRequest,
    TicketRef,
)
from areal_hpc.wire.proxy import KeepFailedSessionRequest
from areal_hpc.wire.retry import Backoff
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow, find_row_defect

log = logging.getLogger(__name__)

SEALED_SHARD_BYTES = 128 * 1024 * 1024
"""Size of finished tickets that are sealed at once; large files reduce Lustre metadata load."""
CHECK_PERIOD_S = 0.2
BACKOFF = Backoff(0.2, 5.0)
LEDGER_TIMEOUT_S = 10.0
MAX_KEPT_PER_CAUSE = 200
"""Failed episodes that a cell keeps per cause, which is an exception and its line."""
MAX_REMEMBERED_ANSWERS = 4096
"""Failed sessions for which a repeated `/rl/keep_failed` gets the same reply."""
Sealed = TypeVar("Sealed")


class TicketSealer:
    """Sealer of one cell. It seals by size, by age or on request, and retries to settle."""

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
        self._sealing_trained, self._sealing_untrained = asyncio.Lock(), asyncio.Lock()
        self._settling = asyncio.Lock()
        self._seals: set[asyncio.Future[Any]] = set()
        self._wake_up = asyncio.Event()
        self._not_before = 0.0
        self._kept_by_cause = Counter[str]()
        """Failed episodes that the cell keeps, also those of its earlier proxies."""
        self._kept_by_session: dict[str, bool] = {}
        """Latest decisions of `keep_failed`; a session may be sealed or deleted by now."""

    def recover_interrupted_seals(self) -> None:
        """Record, and index if need be, the seals that an earlier proxy did not record."""
        repair_index(self._paths, self._cell)
        shards = read_index(self._paths.shard_index_dir, self._cell)
        untrained = [row for shard in shards for row in shard.untrained]
        sealed_ids = {row.session_id for row in untrained}
        apart = [session_id for session_id in self._store.apart if session_id in sealed_ids]
        refs = [
            ticket.ref
            for ticket in self._list_finished(evaluation=True)
            if any(session.session_id in sealed_ids for session in ticket.sessions)
        ]
        if apart or refs:
            self._recorder.record(UntrainedSealed(refs, apart))
        self._kept_by_cause.update(
            row.cause for row in untrained if row.kind == RowKind.FAILED.label
        )
        failures = [session.failure for session in self._store.apart.values() if session.failure]
        self._kept_by_cause.update(failure.cause for failure in failures)
        sealed = locate_tickets(shards)
        unrecorded = [sealed[t.ref] for t in self._list_finished() if t.ref in sealed]
        if unrecorded:
            log.info("%d tickets had been sealed before the restart", len(unrecorded))
            self._recorder.record(TicketsSealed(unrecorded))

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
                tickets, held_out = self._list_finished(), self._list_finished(evaluation=True)
                if self._is_seal_due(tickets, ()):
                    await self._seal(self._seal_training_tickets())
                if self._is_seal_due(held_out, self._store.apart.values()):
                    await self._seal(self._seal_untrained())
                await self._settle()
                pauses = iter(BACKOFF)
            except (ClusterError, OSError) as error:  # too many open files is a reason to wait
                pause_s = next(pauses)
                log.warning("sealing or settling failed, next try in %.1f s: %s", pause_s, error)
                self._not_before = time.monotonic() + pause_s

    async def seal_training_tickets(self) -> int:
        """Seal finished tickets, settle them if the ledger answers, and return their number."""
        count = await self._seal(self._seal_training_tickets())
        await self._try_settling()
        return count

    async def seal_all(self) -> None:
        """Seal all that is finished, training tickets first."""
        await self._seal(self._seal_training_tickets())
        await self._seal(self._seal_untrained())
        await self._try_settling()

    def keep_failed(self, request: KeepFailedSessionRequest) -> bool:
        """Keep an ended session, or delete it if enough failures of its cause are kept."""
        if request.session_id in self._store.apart:
            return True
        must_keep = self._kept_by_cause[request.cause] < MAX_KEPT_PER_CAUSE
        if must_keep:
            self._recorder.record(
                SessionFailed(request.session_id, request.cause, request.error, time.time())
            )
            self._kept_by_cause[request.cause] += 1
        else:
            self._recorder.record(SessionDropped(request.session_id))
        self._kept_by_session[request.session_id] = must_keep
        while len(self._kept_by_session) > MAX_REMEMBERED_ANSWERS:
            del self._kept_by_session[next(iter(self._kept_by_session))]
        return must_keep

    def find_past_keep_decision(self, session_id: str) -> bool | None:
        return self._kept_by_session.get(session_id)

    async def _try_settling(self) -> None:
        try:
            await self._settle()
        except ClusterError as error:
            log.warning("sealed; settling with the ledger failed and will be retried: %s", error)

    def _list_finished(self, *, evaluation: bool = False) -> list[FinishedTicket]:
        return [t for t in self._store.finished.values() if t.is_evaluation is evaluation]

    def _is_seal_due(self, tickets: Sequence[FinishedTicket], apart: Iterable[Session]) -> bool:
        since = [ticket.finished_at for ticket in tickets]
        held_bytes = sum(ticket.row_bytes for ticket in tickets)
        for session in apart:
            since.append(session.failure.failed_at if session.failure else session.ended_at)
            held_bytes += session.recorded_bytes
        is_large = held_bytes >= SEALED_SHARD_BYTES
        return bool(since) and (is_large or time.time() - min(since) >= self._config.seal_after_s)

    async def _seal(self, work: Coroutine[Any, Any, Sealed]) -> Sealed:
        """Await a seal, which goes on if this is cancelled."""
        task = asyncio.ensure_future(work)
        self._seals.add(task)
        task.add_done_callback(self._seals.discard)
        return await asyncio.shield(task)

    async def _seal_training_tickets(self) -> int:
        async with self._sealing_trained:
            tickets = self._list_finished()
            if not tickets:
                return 0
            rows_of, defects = await asyncio.to_thread(_build_rows, tickets, self._cell)
            for ref, defect in defects.items():
                log.error("%s is dropped, for it cannot be sealed: %s", ref, defect)
                self._recorder.record(TicketDropped(ref, f"cannot be sealed: {defect}"))
            if not rows_of:
                return 0
            rows = [row for ticket_rows in rows_of.values() for row in ticket_rows]
            shard = await asyncio.to_thread(self._write_shard, rows)
            self._recorder.record(TicketsSealed(shard.list_sealed_tickets()))
            return len(shard.tickets)

    async def _seal_untrained(self) -> None:
        async with self._sealing_untrained:
            tickets, apart = self._list_finished(evaluation=True), [*self._store.apart.values()]
            if not (tickets or apart):
                return
            rows = await asyncio.to_thread(_build_untrained_rows, tickets, apart, self._cell)
            if rows:
                await asyncio.to_thread(self._write_shard, rows)
            refs, apart_ids = [t.ref for t in tickets], [session.session_id for session in apart]
            self._recorder.record(UntrainedSealed(refs, apart_ids))
            await self._recorder.compact_grown_journal()

    def _write_shard(self, rows: Sequence[TrajectoryRow]) -> SealedShard:
        """Write and index a shard, in a thread: finished episodes no longer change."""
        began = time.monotonic()
        paths, kinds = self._paths, Counter(row.kind.label for row in rows)
        with time_span("seal", "shards", rows=len(rows)) as facts:
            shard = write_sealed_shard(rows, paths.shards_dir, paths.shard_index_dir, self._cell)
            facts["shard"] = shard.file
        log.info(
            "sealed %s rows, %d tokens as %s in %.3f s",
            dict(kinds),
            shard.tokens,
            shard.file,
            time.monotonic() - began,
        )
        return shard

    async def _settle(self) -> None:
        async with self._settling:
            tickets, dropped = list(self._store.sealed.values()), dict(self._store.dropped)
            if not (tickets or dropped):
                return
            self._ledger.look_up()
            if tickets:
                shards = dict.fromkeys(ticket.shard for ticket in tickets)
                settle = SettleShardsRequest(self._cell, [*shards])
                await self._ledger.call("/settle", settle, Acknowledged)
            for ref, reason in dropped.items():
                drop = DropTicketRequest(self._cell, ref, reason)
                await self._ledger.call("/drop", drop, Acknowledged)
            self._recorder.record(TicketsAcknowledged([*(t.ref for t in tickets), *dropped]))
            await self._recorder.compact_grown_journal()

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


def _build_untrained_rows(
    tickets: Sequence[FinishedTicket], apart: Sequence[Session], cell: str
) -> list[TrajectoryRow]:
    rows: list[TrajectoryRow] = []
    builders = [(str(ticket.ref), ticket.build_rows) for ticket in tickets]
    builders += [(session.session_id, session.build_apart_rows) for session in apart]
    for name, build_rows in builders:
        try:
            episode_rows = build_rows(cell)
        except Exception:  # boundary: one episode must not keep the others from being sealed
            log.exception("the rows of %s cannot be built; it is not kept", name)
            continue
        for row in episode_rows:
            if defect := find_row_defect(row):
                log.error("a row of %s is not kept: %s", name, defect)
            else:
                rows.append(row)
    return rows
