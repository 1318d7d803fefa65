"""Sealer of what is recorded and never trained on: held-out tickets and failed episodes.

Their journal goes as that of training tickets does: finished (or failed), sealed in a shard with an
index line, noted as sealed. Nobody is told, since nobody waits for them. A proxy that dies before
the last of these finds the episodes in its index when it starts again.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from areal_hpc.proxy.sessions.events import SessionDropped, SessionFailed, UntrainedSealed
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.store import FinishedTicket, Session
from areal_hpc.recipe.sections.proxy_and_shards import ShardConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import SealedShard
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.proxy import KeepFailedSessionRequest
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow, find_row_defect

log = logging.getLogger(__name__)

MAX_KEPT_PER_CAUSE = 200
"""Failed episodes of one exception in one line that a cell keeps: a bug needs no more examples."""
MAX_REMEMBERED_ANSWERS = 4096
"""Failed sessions whose repeated `/rl/keep_failed` is still answered."""


class UntrainedSealer:
    """Seals by bytes or by age, apart from tickets that the trainer waits for."""

    def __init__(
        self, recorder: JournaledRecorder, paths: RunPaths, cell: str, config: ShardConfig
    ) -> None:
        self._recorder, self._store = recorder, recorder.store
        self._paths, self._cell, self._config = paths, cell, config
        self._kept = Counter[str]()
        """Failed episodes by cause, those of earlier proxies of the cell included."""
        self._answered: dict[str, bool] = {}
        """What was answered for each session of late: it may be sealed or forgotten by now."""
        self._sealing = asyncio.Lock()
        self._seal_task: asyncio.Future[None] | None = None

    def record_already_sealed(self, shards: Sequence[SealedShard]) -> None:
        """Note what an earlier proxy sealed but could not note. `shards`: the cell's own."""
        indexed = [one for shard in shards for one in shard.untrained]
        sealed_ids = {one.session_id for one in indexed}
        failed = [name for name in self._store.failed if name in sealed_ids]
        refs = [
            ticket.ref
            for ticket in self._list_evaluations()
            if any(session.session_id in sealed_ids for session in ticket.sessions)
        ]
        if failed or refs:
            self._recorder.journal_and_apply(UntrainedSealed(refs, failed))
        self._kept.update(one.cause for one in indexed if one.kind == RowKind.FAILED.label)
        self._kept.update(one.failure.cause for one in self._store.failed.values() if one.failure)

    def keep_or_drop_failed(self, request: KeepFailedSessionRequest) -> bool:
        """Keep an ended session, unless enough failures of its cause are kept: then forget it."""
        if request.session_id in self._store.failed:
            return True
        must_keep = self._kept[request.cause] < MAX_KEPT_PER_CAUSE
        if must_keep:
            self._recorder.journal_and_apply(
                SessionFailed(request.session_id, request.cause, request.error, time.time())
            )
            self._kept[request.cause] += 1
        else:
            self._recorder.journal_and_apply(SessionDropped(request.session_id))
        self._answered[request.session_id] = must_keep
        while len(self._answered) > MAX_REMEMBERED_ANSWERS:
            del self._answered[next(iter(self._answered))]
        return must_keep

    def find_past_keep_decision(self, session_id: str) -> bool | None:
        return self._answered.get(session_id)

    async def seal_if_due(self) -> None:
        tickets, failed = self._list_evaluations(), list(self._store.failed.values())
        since = [ticket.finished_at for ticket in tickets]
        since += [session.failure.failed_at for session in failed if session.failure]
        held_bytes = sum(ticket.row_bytes for ticket in tickets)
        held_bytes += sum(session.recorded_bytes for session in failed)
        is_due = held_bytes >= self._config.target_bytes
        if since and (is_due or time.time() - min(since) >= self._config.seal_after_s):
            await self.seal_now()

    async def seal_now(self) -> None:
        """Seal all that there is; a cancellation leaves a seal that is under way to end."""
        self._seal_task = asyncio.ensure_future(self._seal_under_lock())
        await asyncio.shield(self._seal_task)

    async def _seal_under_lock(self) -> None:
        async with self._sealing:
            tickets, failed = self._list_evaluations(), list(self._store.failed.values())
            if not (tickets or failed):
                return
            await asyncio.to_thread(self._write_shard, tickets, failed)
            refs = [ticket.ref for ticket in tickets]
            self._recorder.journal_and_apply(
                UntrainedSealed(refs, [one.session_id for one in failed])
            )
            await self._recorder.compact_if_due()

    def _list_evaluations(self) -> list[FinishedTicket]:
        return [one for one in self._store.finished.values() if one.is_evaluation]

    def _write_shard(self, tickets: Sequence[FinishedTicket], failed: Sequence[Session]) -> None:
        """Runs in a thread: nothing changes in what is finished or has failed."""
        rows = [
            *(
                row
                for one in tickets
                for row in _build_sound_rows(one.ref, one.build_rows, self._cell)
            ),
            *(
                row
                for one in failed
                for row in _build_sound_rows(one.session_id, one.build_failed_rows, self._cell)
            ),
        ]
        if rows:
            paths = self._paths
            shard = write_sealed_shard(rows, paths.shards_dir, paths.shard_index_dir, self._cell)
            kinds = Counter(row.kind.label for row in rows)
            log.info("sealed %s rows as %s", dict(kinds), shard.file)


def _build_sound_rows(
    ticket_or_session: object, build_rows: Callable[[str], list[TrajectoryRow]], cell: str
) -> Iterator[TrajectoryRow]:
    try:
        rows = build_rows(cell)
    except Exception:  # boundary: one episode must not keep the others from being sealed
        log.exception("the rows of %s cannot be built; it is not kept", ticket_or_session)
        return
    for row in rows:
        if defect := find_row_defect(row):
            log.error("a row of %s is not kept: %s", ticket_or_session, defect)
        else:
            yield row
