"""Sealer: finished tickets into shards, then settled with the ledger.

A ticket is finished in the journal, then sealed in a shard with an index line, then noted as
sealed in the journal, then settled. A proxy that dies between the middle two finds its shard
in the index when it starts again, so that no ticket is sealed twice.

A ticket that cannot become sound rows is dropped with the reason, in the journal and then at the
ledger, which issues another one in its place.

Held-out tickets and failed episodes go into shards of their own, which hold nothing that the
trainer waits for and that the ledger must know.
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
"""Bytes in the journal that are sealed at once; large files reduce Lustre metadata load."""
CHECK_PERIOD_S = 0.2
BACKOFF = Backoff(0.2, 5.0)
LEDGER_TIMEOUT_S = 10.0
MAX_KEPT_PER_CAUSE = 200
"""Failed episodes of one exception in one line that a cell keeps: a bug needs no more examples."""
MAX_REMEMBERED_ANSWERS = 4096
"""Failed sessions whose repeated `/rl/keep_failed` is still answered."""
Sealed = TypeVar("Sealed")


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
        self._sealing_trained, self._sealing_untrained = asyncio.Lock(), asyncio.Lock()
        self._settling = asyncio.Lock()
        self._seals: set[asyncio.Future[Any]] = set()
        self._wake_up = asyncio.Event()
        self._not_before = 0.0
        self._kept_by_cause = Counter[str]()
        """Failed episodes that are kept, those of earlier proxies of the cell included."""
        self._answered: dict[str, bool] = {}
        """What `keep_failed` answered of late: the session may be sealed or forgotten by now."""

    def recover_interrupted_seals(self) -> None:
        """Note what an earlier proxy sealed but could not note, nor perhaps index."""
        repair_index(self._paths, self._cell)
        shards = read_index(self._paths.shard_index_dir, self._cell)
        untrained = [one for shard in shards for one in shard.untrained]
        sealed_ids = {one.session_id for one in untrained}
        failed = [name for name in self._store.failed if name in sealed_ids]
        refs = [
            ticket.ref
            for ticket in self._list_finished(evaluation=True)
            if any(session.session_id in sealed_ids for session in ticket.sessions)
        ]
        if failed or refs:
            self._recorder.record(UntrainedSealed(refs, failed))
        self._kept_by_cause.update(
            one.cause for one in untrained if one.kind == RowKind.FAILED.label
        )
        failures = [one.failure for one in self._store.failed.values() if one.failure]
        self._kept_by_cause.update(one.cause for one in failures)
        sealed = locate_tickets(shards)
        found = [sealed[one.ref] for one in self._list_finished() if one.ref in sealed]
        if found:
            log.info("%d tickets had been sealed before the restart", len(found))
            self._recorder.record(TicketsSealed(found))

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
                if self._is_seal_due(held_out, self._store.failed.values()):
                    await self._seal(self._seal_untrained())
                await self._settle()
                pauses = iter(BACKOFF)
            except (ClusterError, OSError) as error:  # too many open files is a reason to wait
                pause_s = next(pauses)
                log.warning("sealing or settling failed, next try in %.1f s: %s", pause_s, error)
                self._not_before = time.monotonic() + pause_s

    async def seal_training_tickets(self) -> int:
        """Seal what is finished, settle it if the ledger answers; how many tickets were sealed."""
        count = await self._seal(self._seal_training_tickets())
        await self._try_settling()
        return count

    async def seal_all(self) -> None:
        """Seal what is finished, what the trainer waits for first."""
        await self._seal(self._seal_training_tickets())
        await self._seal(self._seal_untrained())
        await self._try_settling()

    def keep_failed(self, request: KeepFailedSessionRequest) -> bool:
        """Keep an ended session, unless enough failures of its cause are kept: then forget it."""
        if request.session_id in self._store.failed:
            return True
        must_keep = self._kept_by_cause[request.cause] < MAX_KEPT_PER_CAUSE
        if must_keep:
            self._recorder.record(
                SessionFailed(request.session_id, request.cause, request.error, time.time())
            )
            self._kept_by_cause[request.cause] += 1
        else:
            self._recorder.record(SessionDropped(request.session_id))
        self._answered[request.session_id] = must_keep
        while len(self._answered) > MAX_REMEMBERED_ANSWERS:
            del self._answered[next(iter(self._answered))]
        return must_keep

    def find_past_keep_decision(self, session_id: str) -> bool | None:
        return self._answered.get(session_id)

    async def _try_settling(self) -> None:
        try:
            await self._settle()
        except ClusterError as error:
            log.warning("sealed; settling with the ledger failed and will be retried: %s", error)

    def _list_finished(self, *, evaluation: bool = False) -> list[FinishedTicket]:
        return [one for one in self._store.finished.values() if one.is_evaluation is evaluation]

    def _is_seal_due(self, tickets: Sequence[FinishedTicket], failed: Iterable[Session]) -> bool:
        since = [ticket.finished_at for ticket in tickets]
        held_bytes = sum(ticket.row_bytes for ticket in tickets)
        for session in failed:
            since += [session.failure.failed_at] if session.failure else []
            held_bytes += session.recorded_bytes
        is_large = held_bytes >= SEALED_SHARD_BYTES
        return bool(since) and (is_large or time.time() - min(since) >= self._config.seal_after_s)

    async def _seal(self, work: Coroutine[Any, Any, Sealed]) -> Sealed:
        """Await a seal; a cancellation leaves it to come to its end."""
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
            rows = [row for found in rows_of.values() for row in found]
            shard = await asyncio.to_thread(self._write_shard, rows)
            self._recorder.record(TicketsSealed(shard.list_sealed_tickets()))
            return len(shard.tickets)

    async def _seal_untrained(self) -> None:
        async with self._sealing_untrained:
            tickets, failed = self._list_finished(evaluation=True), [*self._store.failed.values()]
            if not (tickets or failed):
                return
            rows = await asyncio.to_thread(_build_untrained_rows, tickets, failed, self._cell)
            if rows:
                await asyncio.to_thread(self._write_shard, rows)
            refs, failed_ids = [one.ref for one in tickets], [one.session_id for one in failed]
            self._recorder.record(UntrainedSealed(refs, failed_ids))
            await self._recorder.compact_grown_journal()

    def _write_shard(self, rows: Sequence[TrajectoryRow]) -> SealedShard:
        """Runs in a thread: nothing changes in what is finished or has failed."""
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
                shards = dict.fromkeys(one.shard for one in tickets)
                settle = SettleShardsRequest(self._cell, [*shards])
                await self._ledger.call("/settle", settle, Acknowledged)
            for ref, reason in dropped.items():
                drop = DropTicketRequest(self._cell, ref, reason)
                await self._ledger.call("/drop", drop, Acknowledged)
            self._recorder.record(TicketsAcknowledged([*(one.ref for one in tickets), *dropped]))
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
    tickets: Sequence[FinishedTicket], failed: Sequence[Session], cell: str
) -> list[TrajectoryRow]:
    rows: list[TrajectoryRow] = []
    builders = [(str(one.ref), one.build_rows) for one in tickets]
    builders += [(one.session_id, one.build_failed_rows) for one in failed]
    for name, build_rows in builders:
        try:
            built = build_rows(cell)
        except Exception:  # boundary: one episode must not keep the others from being sealed
            log.exception("the rows of %s cannot be built; it is not kept", name)
            continue
        for row in built:
            if defect := find_row_defect(row):
                log.error("a row of %s is not kept: %s", name, defect)
            else:
                rows.append(row)
    return rows
