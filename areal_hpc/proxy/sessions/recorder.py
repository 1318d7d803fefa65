"""Recorder of session events: it checks, journals and applies them, and replays them at a start."""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError, UntrainableCallError
from areal_hpc.proxy.sessions.store import (
    Event,
    InteractionAdded,
    ReplySampled,
    RewardSet,
    Session,
    SessionDropped,
    SessionOpened,
    SessionStore,
    TicketDropped,
    TicketFinished,
    TicketsAcknowledged,
    TicketsSealed,
    UntrainedSealed,
    decode_event,
    encode_event,
)
from areal_hpc.session.call_records import compute_reply_digest_of_call, find_interaction_defect
from areal_hpc.session.tree import Interaction
from areal_hpc.shards.journal import JournalRecord, JournalWriter, read_journal
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.trajectory import MAX_VOCAB_SIZE

log = logging.getLogger(__name__)

EVENT_RECORD_KIND = 1
SYNC_INTERVAL_S = 0.05
MIN_COMPACTION_GROWTH_BYTES = 1 << 20
_SESSION_REMOVING_EVENTS = (
    SessionDropped,
    TicketDropped,
    TicketFinished,
    TicketsSealed,
    UntrainedSealed,
)


@dataclass(frozen=True, slots=True)
class JournalCompactionPlan:
    """Records that a compaction drops: decided in the event loop, used in a thread."""

    removed_session_ids: frozenset[str]
    closed_refs: frozenset[TicketRef]
    """Tickets that are sealed, or dropped because they cannot be."""
    settled: frozenset[TicketRef]
    all_settled: bool
    """Whether the ledger acknowledged every sealed ticket."""

    def must_keep(self, record: JournalRecord) -> bool:
        match decode_event(record.payload):
            case TicketFinished(ref=ref):
                return ref not in self.closed_refs
            case TicketDropped(ref=ref):
                return ref not in self.settled
            case TicketsSealed(tickets=tickets):
                return any(ticket.ref not in self.settled for ticket in tickets)
            case UntrainedSealed(refs=refs, session_ids=session_ids):
                return not (
                    self.closed_refs.issuperset(refs)
                    and self.removed_session_ids.issuperset(session_ids)
                )
            case TicketsAcknowledged(refs=refs):
                return not self.all_settled or any(ref not in self.settled for ref in refs)
            case event:
                return event.session_id not in self.removed_session_ids


class JournaledRecorder:
    """Recorder of all changes of a `SessionStore`, with a write-ahead journal.

    Its creation replays the journal of an earlier proxy of the cell. Disposable sessions are in
    memory alone.

    Args:
        path: Path of the journal.
        vocab_size: Limit of the token ids of recorded calls.
        sync_interval_s: Longest time between a write and its sync to disk.
    """

    def __init__(
        self,
        path: Path,
        vocab_size: int = MAX_VOCAB_SIZE,
        *,
        sync_interval_s: float = SYNC_INTERVAL_S,
    ) -> None:
        self.store = SessionStore()
        self.folder = path.parent
        self.failure: ClusterError | None = None
        """Error of the journal, after which no request may be answered."""
        self._vocab_size = vocab_size
        self._journal = JournalWriter(path, sync_interval_s)
        self._compacting = asyncio.Lock()
        self._gone_sessions: set[str] = set()
        self._sealed_refs: set[TicketRef] = set()
        self._settled_refs: set[TicketRef] = set()
        began = time.monotonic()
        count = 0
        for record in read_journal(path):
            event = decode_event(record.payload)
            self._replay_event(event)
            self._count_bytes(event, len(record.payload))
            count += 1
        if count:
            log.info(
                "replayed %d journal events in %.2f s: %d sessions, %d finished tickets",
                count,
                time.monotonic() - began,
                len(self.store.sessions),
                len(self.store.finished),
            )
        self._rotated_bytes = self._journal.journal_size_bytes

    def record(self, event: Event) -> None:
        if isinstance(event, InteractionAdded) and (defect := self._find_defect(event)):
            raise UntrainableCallError(defect)
        self._record_sound(event)

    def _record_sound(self, event: Event) -> None:
        size_bytes = 0
        if self._must_journal(event):
            payload = encode_event(event)
            size_bytes = len(payload)
            try:
                self._journal.append(EVENT_RECORD_KIND, payload)
            except ClusterError as error:
                self.failure = error
                raise
        self._apply_event(event)
        self._count_bytes(event, size_bytes)

    def record_client_call(self, session: Session, call: Interaction) -> None:
        if defect := find_interaction_defect(call, session.tree, self._vocab_size):
            raise UntrainableCallError(defect)
        digest = compute_reply_digest_of_call(call, session.tree)
        if not session.unrecorded_replies[digest]:
            raise UntrainableCallError(
                "expected prompt, tokens, log-probabilities, weight versions and sampling mask (if "
                "the reply had one) of a reply that /generate gave this session and that is not "
                "recorded yet, got others"
            )
        self._record_sound(InteractionAdded(session.session_id, call, digest))

    def _count_bytes(self, event: Event, size_bytes: int) -> None:
        match event:
            case ReplySampled(digest=digest):
                size_bytes = size_bytes or len(digest)
            case InteractionAdded(interaction=call):
                parts = (call.context, call.new_ids, call.output_ids, call.logprobs)
                size_bytes = size_bytes or sum(map(len, (*parts, call.kept_counts, call.kept_ids)))
                size_bytes -= len(call.routes.packed) if call.routes else 0  # not due to the client
            case _:
                return
        self.store.sessions[event.session_id].recorded_bytes += size_bytes

    def holds_session(self, session: Session) -> bool:
        return self.store.sessions.get(session.session_id) is session

    def _find_defect(self, event: InteractionAdded) -> str | None:
        tree = self.store.sessions[event.session_id].tree
        return find_interaction_defect(event.interaction, tree, self._vocab_size)

    def _replay_event(self, event: Event) -> None:
        """Apply an event of the journal.

        An unsound call is left out, and its session marked: the sealer drops the session's ticket.
        """
        if isinstance(event, InteractionAdded) and (defect := self._find_defect(event)):
            self._mark_unsound(event.session_id, defect)
        elif isinstance(event, InteractionAdded):
            try:
                self._apply_event(event)
            except Exception as error:  # boundary: one call must not keep the cell from starting
                log.exception("session %s: a recorded call cannot be replayed", event.session_id)
                self._mark_unsound(event.session_id, repr(error))
        elif isinstance(event, RewardSet) and (
            event.interaction_id not in self.store.sessions[event.session_id].tree
        ):
            log.warning(
                "session %s: ignored a reward for a call that was not replayed", event.session_id
            )
        else:
            self._apply_event(event)

    def _mark_unsound(self, session_id: str, defect: str) -> None:
        session = self.store.sessions[session_id]
        session.defect = session.defect or f"its journal holds an unsound call: {defect}"
        log.error("session %s cannot be trained on: %s", session_id, session.defect)

    def _must_journal(self, event: Event) -> bool:
        if isinstance(event, SessionOpened):
            return not event.request.disposable
        session_id = getattr(event, "session_id", None)  # others are of tickets
        return session_id is None or self.store.sessions[session_id].must_persist

    def _apply_event(self, event: Event) -> None:
        if not isinstance(event, _SESSION_REMOVING_EVENTS):
            self.store.apply(event)
            if isinstance(event, TicketsAcknowledged):
                self._settled_refs.update(event.refs)
            return
        before = set(self.store.sessions)
        self.store.apply(event)
        self._gone_sessions |= before - self.store.sessions.keys()
        if isinstance(event, TicketDropped):
            self._sealed_refs.add(event.ref)
        elif isinstance(event, TicketsSealed):
            self._sealed_refs.update(ticket.ref for ticket in event.tickets)
        elif isinstance(event, UntrainedSealed):  # the ledger does not acknowledge these
            self._sealed_refs.update(event.refs)
            self._settled_refs.update(event.refs)

    # Compaction ---------------------------------------------------------------------------

    async def compact_grown_journal(self) -> None:
        async with self._compacting:
            # Has it doubled since the last compaction?
            limit_bytes = 2 * self._rotated_bytes + MIN_COMPACTION_GROWTH_BYTES
            if self._journal.journal_size_bytes > limit_bytes and self._gone_sessions:
                await self.compact()

    async def compact(self) -> None:
        """Drop the records that no restart needs, and the ids that are kept to find these."""
        sealed, settled = frozenset(self._sealed_refs), frozenset(self._settled_refs)
        gone = frozenset(self._gone_sessions)
        plan = JournalCompactionPlan(gone, sealed, settled, sealed <= settled)
        await asyncio.to_thread(self._journal.compact, plan.must_keep)
        self._rotated_bytes = self._journal.journal_size_bytes
        self._gone_sessions -= gone
        if plan.all_settled:
            self._settled_refs -= settled
            self._sealed_refs -= sealed

    def close(self) -> None:
        self._journal.close()


class MemoryRecorder(JournaledRecorder):
    """Recorder without a journal: its sessions end with the process."""

    def __init__(self, vocab_size: int = MAX_VOCAB_SIZE) -> None:
        self.store = SessionStore()
        self.failure: ClusterError | None = None
        self._vocab_size = vocab_size

    def _must_journal(self, event: Event) -> bool:
        return False

    def _apply_event(self, event: Event) -> None:
        self.store.apply(event)

    async def compact_grown_journal(self) -> None:
        pass

    def close(self) -> None:
        pass
