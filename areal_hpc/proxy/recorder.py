"""Write first, then let it have happened: the journal of a cell and the book it rebuilds."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.proxy.events import (
    Event,
    InteractionAdded,
    RewardSet,
    SessionDropped,
    SessionEnded,
    SessionOpened,
    TicketFinished,
    TicketsSealed,
    TicketsSettled,
    decode_event,
    encode_event,
)
from areal_hpc.proxy.sessions import Session, SessionBook
from areal_hpc.shards.journal import JournalRecord, JournalWriter, read_journal
from areal_hpc.wire.ledger import TicketRef

log = logging.getLogger(__name__)

EVENT_KIND = 1
SMALLEST_ROTATION_BYTES = 1 << 20


class Recorder:
    """The only way to change a `SessionBook` while the proxy runs.

    Opening replays what an earlier proxy of the cell left behind. Sessions that are not trained
    on (evaluations, visitors) are kept in memory alone.

    Raises:
        ClusterError: The journal cannot be opened or written.
    """

    def __init__(self, path: Path, sync_interval_s: float) -> None:
        self.book = SessionBook()
        self.failure: ClusterError | None = None
        """Set when the journal refused: nothing may be answered any more."""
        self._journal = JournalWriter(path, sync_interval_s)
        self._gone_sessions: set[str] = set()
        self._sealed_refs: set[TicketRef] = set()
        self._settled_refs: set[TicketRef] = set()
        began = time.monotonic()
        count = 0
        for record in read_journal(path):
            self._apply(decode_event(record.payload))
            count += 1
        if count:
            log.info(
                "replayed %d events in %.2f s: %d sessions, %d finished tickets",
                count,
                time.monotonic() - began,
                len(self.book.sessions),
                len(self.book.finished),
            )
        self._rotated_bytes = self._journal.bytes_written

    def record(self, event: Event) -> None:
        """Let `event` happen. It survives the death of this process when this returns.

        Raises:
            ClusterError: The journal refused; the event has not happened.
        """
        if self._is_durable(event):
            try:
                self._journal.append(EVENT_KIND, encode_event(event))
            except ClusterError as error:
                self.failure = error
                raise
        self._apply(event)

    def holds(self, session: Session) -> bool:
        """False once the session has been dropped or sealed."""
        return self.book.sessions.get(session.session_id) is session

    def _is_durable(self, event: Event) -> bool:
        match event:
            case SessionOpened():
                return Session(event).is_recorded
            case InteractionAdded() | RewardSet() | SessionEnded() | SessionDropped():
                return self.book.sessions[event.session_id].is_recorded
            case _:
                return True

    def _apply(self, event: Event) -> None:
        before = self.book.sessions.keys() if _removes_sessions(event) else frozenset()
        known = set(before)
        self.book.apply(event)
        self._gone_sessions.update(known - self.book.sessions.keys())
        if isinstance(event, TicketsSealed):
            self._sealed_refs.update(ticket.ref for ticket in event.tickets)
        elif isinstance(event, TicketsSettled):
            self._settled_refs.update(event.refs)

    # Forgetting ---------------------------------------------------------------------------

    @property
    def should_rotate(self) -> bool:
        """True when the journal has doubled since it last held only what is needed."""
        grown = self._journal.bytes_written > 2 * self._rotated_bytes + SMALLEST_ROTATION_BYTES
        return grown and bool(self._gone_sessions)

    def rotate(self) -> None:
        """Drop the records of gone sessions and settled tickets. May run in a thread.

        What is gone is decided before the journal is read, so that records appended meanwhile
        are never taken for gone.

        Raises:
            ClusterError: The disk refuses; the journal stays as it is.
        """
        gone, sealed = frozenset(self._gone_sessions), frozenset(self._sealed_refs)
        settled = frozenset(self._settled_refs)
        all_settled = sealed <= settled

        def is_needed(record: JournalRecord) -> bool:
            match decode_event(record.payload):
                case TicketFinished(ref=ref):
                    return ref not in sealed
                case TicketsSealed(tickets=tickets):
                    return any(ticket.ref not in settled for ticket in tickets)
                case TicketsSettled(refs=refs):
                    return not all_settled or any(ref not in settled for ref in refs)
                case event:
                    return event.session_id not in gone

        self._journal.rotate(is_needed)
        self._rotated_bytes = self._journal.bytes_written
        self._gone_sessions -= gone
        if all_settled:
            self._settled_refs -= settled
            self._sealed_refs -= sealed

    def close(self) -> None:
        """Sync and close the journal."""
        self._journal.close()


def _removes_sessions(event: Event) -> bool:
    return isinstance(event, SessionDropped | TicketFinished | TicketsSealed)
