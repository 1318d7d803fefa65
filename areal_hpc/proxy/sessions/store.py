"""Store of sessions, keys and tickets, and the journaled events that change it.

A live proxy applies an event after it has written it; a restarted one applies the events that it
reads. Nothing else changes a `SessionStore`, so both reach the same state.
"""

import hashlib
import secrets
import time
from collections import Counter
from dataclasses import replace

import msgspec
from msgspec import Struct

from areal_hpc.proxy.sessions.decoded_messages import DecodedMessages
from areal_hpc.session.credit import compute_episode_reward, give_reward
from areal_hpc.session.export import (
    EpisodeKey,
    RowPlan,
    build_auxiliary_rows,
    build_failed_session_rows,
    build_training_rows,
    plan_rows,
)
from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import SealedTicket, TicketRef
from areal_hpc.wire.proxy import StartSessionRequest
from areal_hpc.wire.trajectory import RowKind, RowRecord, TrajectoryRow, find_row_defect

ROW_BYTES_PER_TOKEN = 17
"""Size of an int32 id, a uint8 mask, a float32 log-probability and an int64 version."""
SPENT_SESSION_RETENTION_S = 60.0
MAX_KEPT_RESPONSE_BYTES_PER_SESSION = 1 << 20
"""Limit of stored Responses, each of which repeats its request's tools and instructions."""
NO_TICKET_ID = -1
"""Ticket in the rows of a session that is of no ticket."""
MAX_REMEMBERED_TICKETS = 4096
"""Settled tickets for which a repeated `/rl/finish_ticket` gets the same reply."""


def generate_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"


def compute_key_digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


class SessionOpened(Struct, tag="opened", frozen=True):
    """Event that a session was opened, with digests of its keys."""

    session_id: str
    key_digest: bytes
    request: StartSessionRequest
    opened_at: float = 0.0
    """Unix time."""
    control_digest: bytes = b""
    """Digest of the key for rewards and the end; empty if that is the same key."""


class InteractionAdded(Struct, tag="interaction", frozen=True):
    session_id: str
    interaction: Interaction
    reply_digest: bytes = b""
    """Digest of the `ReplySampled` that a client records with this; empty if the proxy did."""


class ReplySampled(Struct, tag="sampled", frozen=True):
    """Event that the session's client got a reply from `/generate`, which it may record once."""

    session_id: str
    digest: bytes
    tokens: int = 0


class RewardSet(Struct, tag="reward", frozen=True):
    """Event that an interaction got a reward; a second one replaces the first."""

    session_id: str
    interaction_id: str
    reward: Reward
    is_named: bool = False
    """Whether the agent named the interaction; else the reward is that of the episode."""


class ConversationsMarkedAuxiliary(Struct, tag="auxiliary", frozen=True):
    session_id: str
    reasons: dict[str, str]


class SessionEnded(Struct, tag="ended", frozen=True):
    session_id: str
    ended_at: float = 0.0
    """Unix time."""


class SessionFailed(Struct, tag="failed", frozen=True):
    """Event that an ended session's episode failed: it is kept, but counts for no ticket."""

    session_id: str
    cause: str
    error: str
    failed_at: float


class SessionDropped(Struct, tag="dropped", frozen=True):
    """Event that a session is deleted, for example because it was idle for too long."""

    session_id: str


class TicketFinished(Struct, tag="finished", frozen=True):
    """Event that a ticket consists of the named sessions; its others are discarded."""

    ref: TicketRef
    session_ids: list[str]
    finished_at: float


class TicketDropped(Struct, tag="ticket_dropped", frozen=True):
    """Event that a finished ticket cannot become rows, which the ledger has not acknowledged."""

    ref: TicketRef
    reason: str


class TicketsSealed(Struct, tag="sealed", frozen=True):
    """Event that tickets are in a sealed, indexed shard, which the ledger has not acknowledged."""

    tickets: list[SealedTicket]


class UntrainedSealed(Struct, tag="untrained_sealed", frozen=True):
    """Event that rows not for training are in a sealed, indexed shard, or cannot be built."""

    refs: list[TicketRef]
    session_ids: list[str]


class TicketsAcknowledged(Struct, tag="settled", frozen=True):
    """Event that the ledger acknowledged sealed or dropped tickets."""

    refs: list[TicketRef]


Event = (
    SessionOpened
    | InteractionAdded
    | ReplySampled
    | RewardSet
    | ConversationsMarkedAuxiliary
    | SessionEnded
    | SessionFailed
    | SessionDropped
    | TicketFinished
    | TicketDropped
    | TicketsSealed
    | UntrainedSealed
    | TicketsAcknowledged
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(payload: bytes) -> Event:
    return _decoder.decode(payload)


class Session:
    def __init__(self, opened_event: SessionOpened) -> None:
        self.opened = opened_event
        self.session_id = opened_event.session_id
        self.request = opened_event.request
        self.tree = InteractionTree()
        self.ended = False
        self.ended_at = 0.0
        self.failure: SessionFailed | None = None
        self.is_exported = False
        """Whether its rows were exported: then it is kept only for a repetition of the request."""
        self.in_flight = 0
        self.touched_at = time.monotonic()
        self.latest_messages = DecodedMessages()
        self.responses: dict[str, bytes] = {}
        """Bodies of the newest Responses by id, which the client may retrieve."""
        self._response_bytes = 0
        self.calls = 0
        """Number of model calls begun, from which their seeds are derived."""
        self.sampled_tokens = 0
        self.reserved_tokens = 0
        """Tokens that replies in flight may sample, if the session has a limit of tokens."""
        self.unrecorded_replies: Counter[bytes] = Counter()
        """Digests of replies from `/generate` that its client has not recorded."""
        self.recorded_bytes = 0
        """Approximate size of all its events."""
        self.receiving_bytes = 0
        """Received bytes of request bodies that are not complete."""
        self.new_grammars: Counter[bytes] = Counter()
        """Grammars of calls in flight that wait for their trial, by digest."""
        self.client = ""
        """User agent of its latest request."""
        self.defect = ""
        """Reason that it cannot become rows; empty unless the journal has unsound events of it."""

    @property
    def is_trained(self) -> bool:
        ref = self.request.ref
        return ref is not None and ref.eval_step < 0

    @property
    def is_judged_by_person(self) -> bool:
        request = self.request
        return request.is_personal and request.ref is None and self.reward is not None

    @property
    def must_persist(self) -> bool:
        return not self.request.disposable

    @property
    def reward(self) -> float | None:
        return compute_episode_reward(self.tree, self.request.export.is_credited)

    def keep_response(self, response_id: str, body: bytes) -> None:
        """Keep the body of a Response; drop the oldest ones beyond the limit."""
        self.responses[response_id] = body
        self._response_bytes += len(body)
        while (
            self._response_bytes > MAX_KEPT_RESPONSE_BYTES_PER_SESSION and len(self.responses) > 1
        ):
            self.drop_response(next(iter(self.responses)))

    def drop_response(self, response_id: str) -> None:
        self._response_bytes -= len(self.responses.pop(response_id, b""))

    def touch(self) -> None:
        self.touched_at = time.monotonic()

    def build_rows(self, ref: TicketRef, cell: str) -> list[TrajectoryRow]:
        kind = RowKind.TRAIN if ref.eval_step < 0 else RowKind.EVALUATION
        key = EpisodeKey(ref.ticket_id, ref.attempt, self.request.episode, kind, ref.eval_step)
        record = self._build_record(cell)
        rows = build_training_rows(self.tree, key, record, self.request.export)
        auxiliary_key = replace(key, kind=RowKind.AUXILIARY)
        auxiliary = build_auxiliary_rows(self.tree, auxiliary_key, record, len(rows))
        # An unsound auxiliary row must not cost the episode.
        return rows + [row for row in auxiliary if find_row_defect(row) is None]

    def build_apart_rows(self, cell: str) -> list[TrajectoryRow]:
        """Build the rows of a failed episode, or of a session that a person judged."""
        ref, failure = self.request.ref, self.failure
        if failure is None:
            key = EpisodeKey(NO_TICKET_ID, 0, 0, RowKind.PERSONAL)
            return build_training_rows(
                self.tree, key, self._build_record(cell), self.request.export
            )
        assert ref is not None
        key = EpisodeKey(
            ref.ticket_id, ref.attempt, self.request.episode, RowKind.FAILED, ref.eval_step
        )
        record = msgspec.structs.replace(
            self._build_record(cell), cause=failure.cause, error=failure.error
        )
        return build_failed_session_rows(self.tree, key, record)

    def count_uses_of_ignored_params(self) -> dict[str, int]:
        return dict(Counter(name for call in self.tree for name in call.ignored))

    def _build_record(self, cell: str) -> RowRecord:
        return RowRecord(
            session_id=self.session_id,
            task_id=self.request.task_id,
            task_index=self.request.task_index,
            cell=cell,
            started_at=self.opened.opened_at,
            ended_at=self.ended_at,
            ignored=self.count_uses_of_ignored_params(),
        )


class FinishedTicket:
    """Ticket whose episodes all ended and no longer change."""

    def __init__(self, ref: TicketRef, sessions: list[Session], finished_at: float) -> None:
        self.ref = ref
        self.sessions = sessions
        self.finished_at = finished_at
        self.defect = next((session.defect for session in sessions if session.defect), "")
        """Reason that it cannot become rows; empty for a sound ticket."""
        plans: list[RowPlan] = []
        try:
            plans = [plan for s in sessions for plan in plan_rows(s.tree, s.request.export)]
        except Exception as error:  # boundary: one ticket must not end the cell; it is dropped
            self.defect = self.defect or f"its rows cannot be planned: {error!r}"
        self.row_count = len(plans)
        self.row_bytes = ROW_BYTES_PER_TOKEN * sum(p.path[-1].num_sequence_tokens for p in plans)
        recorded = (call.routes for plan in plans for call in plan.path)
        self.row_bytes += sum(len(routes.packed) for routes in recorded if routes)

    @property
    def is_evaluation(self) -> bool:
        return self.ref.eval_step >= 0

    def build_rows(self, cell: str) -> list[TrajectoryRow]:
        return [row for session in self.sessions for row in session.build_rows(self.ref, cell)]


class SessionStore:
    """State of all sessions and tickets, which `apply` alone changes."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.finished: dict[TicketRef, FinishedTicket] = {}
        """Finished tickets that are not sealed yet."""
        self.apart: dict[str, Session] = {}
        """Sessions to seal apart that are not sealed yet, by id: of failed episodes and people."""
        self.sealed: dict[TicketRef, SealedTicket] = {}
        self.dropped: dict[TicketRef, str] = {}
        """Reasons that tickets cannot be sealed, until the ledger acknowledges them."""
        self.settled_rows: dict[TicketRef, int] = {}
        self._by_key: dict[bytes, Session] = {}
        self._by_control_key: dict[bytes, Session] = {}

    def find_session_by_key(self, key: str) -> Session | None:
        return self._by_key.get(compute_key_digest(key))

    def find_session_by_control_key(self, key: str) -> Session | None:
        return self._by_control_key.get(compute_key_digest(key))

    def count_rows_of_ticket(self, ref: TicketRef) -> int | None:
        """Return the number of rows of a finished ticket; None if it is not finished."""
        if ref in self.finished:
            return self.finished[ref].row_count
        if ref in self.sealed:
            return len(self.sealed[ref].rows)
        if ref in self.dropped:
            return 0
        return self.settled_rows.get(ref)

    def apply(self, event: Event) -> None:
        """Change the state by a valid event; callers check events before they record them."""
        match event:
            case SessionOpened():
                session = Session(event)
                self.sessions[event.session_id] = session
                self._by_key[event.key_digest] = session
                self._by_control_key[event.control_digest or event.key_digest] = session
            case InteractionAdded():
                session = self.sessions[event.session_id]
                session.tree.add(event.interaction)
                if event.reply_digest:  # `ReplySampled` counted its tokens
                    session.unrecorded_replies -= Counter([event.reply_digest])
                else:
                    session.sampled_tokens += event.interaction.num_output_tokens
            case ReplySampled():
                session = self.sessions[event.session_id]
                session.unrecorded_replies[event.digest] += 1
                session.sampled_tokens += event.tokens
            case RewardSet():
                tree = self.sessions[event.session_id].tree
                give_reward(tree[event.interaction_id], event.reward, event.is_named)
            case ConversationsMarkedAuxiliary():
                self.sessions[event.session_id].tree.auxiliary |= event.reasons
            case SessionEnded():
                session = self.sessions[event.session_id]
                session.ended, session.responses = True, {}
                session.latest_messages.forget()
                session.ended_at = event.ended_at
                if session.is_judged_by_person:
                    self.apart[event.session_id] = session
            case SessionFailed():
                session = self.sessions[event.session_id]
                session.failure = event
                self.apart[event.session_id] = session
            case SessionDropped():
                self._remove_session(self.sessions[event.session_id])
            case TicketFinished():
                self._finish_ticket(event)
            case TicketDropped():
                self._remove_finished_ticket(event.ref)
                self.dropped[event.ref] = event.reason
            case TicketsSealed():
                for ticket in event.tickets:
                    self._remove_finished_ticket(ticket.ref)
                    self.sealed[ticket.ref] = ticket
            case UntrainedSealed():
                self._forget_untrained(event)
            case TicketsAcknowledged():
                for ref in event.refs:
                    self._forget_settled_ticket(ref)

    def _finish_ticket(self, event: TicketFinished) -> None:
        kept = [self.sessions[session_id] for session_id in event.session_ids]
        for session in [*self.sessions.values()]:
            if session.request.ref == event.ref and session not in kept and not session.failure:
                self._remove_session(session)
        self.finished[event.ref] = FinishedTicket(event.ref, kept, event.finished_at)

    def _remove_finished_ticket(self, ref: TicketRef) -> None:
        finished = self.finished.pop(ref, None)  # a compacted journal has no sessions of it
        for session in finished.sessions if finished else []:
            self._remove_session(session)

    def _forget_untrained(self, event: UntrainedSealed) -> None:
        for ref in event.refs:
            finished = self.finished.get(ref)
            self._remove_finished_ticket(ref)
            self._remember_row_count(ref, finished.row_count if finished else 0)
        for session_id in event.session_ids:
            if session := self.apart.get(session_id):
                self._remove_session(session)

    def _forget_settled_ticket(self, ref: TicketRef) -> None:
        ticket = self.sealed.pop(ref, None)
        if ticket is None and self.dropped.pop(ref, None) is None:
            return
        self._remember_row_count(ref, len(ticket.rows) if ticket else 0)

    def _remember_row_count(self, ref: TicketRef, rows: int) -> None:
        self.settled_rows[ref] = rows
        while len(self.settled_rows) > MAX_REMEMBERED_TICKETS:
            del self.settled_rows[next(iter(self.settled_rows))]

    def _remove_session(self, session: Session) -> None:
        del self.sessions[session.session_id]
        self.apart.pop(session.session_id, None)
        opened = session.opened
        for sessions, digest in (
            (self._by_key, opened.key_digest),
            (self._by_control_key, opened.control_digest or opened.key_digest),
        ):
            if sessions.get(digest) is session:  # a newer session may have the same key
                del sessions[digest]

    def list_droppable_sessions(self, older_than_s: float) -> list[Session]:
        """List sessions that were idle for longer than `older_than_s`, without finished tickets'.

        A ticket's sessions wait for one another: none of them is idle while one is used. An ended
        session that is not recorded serves only a repeated end, and an exported one only a repeated
        export: these are listed sooner.
        """
        now = time.monotonic()
        used_at: dict[TicketRef, float] = {}
        for session in self.sessions.values():
            if (ref := session.request.ref) is not None:
                last_used = now if session.in_flight else session.touched_at
                used_at[ref] = max(used_at.get(ref, last_used), last_used)

        def is_idle(session: Session) -> bool:
            ref = session.request.ref
            if session.in_flight or ref in self.finished or session.session_id in self.apart:
                return False
            is_kept = not session.is_exported and (session.must_persist or not session.ended)
            last_used = session.touched_at if ref is None else used_at[ref]
            return now - last_used > (older_than_s if is_kept else SPENT_SESSION_RETENTION_S)

        return [session for session in self.sessions.values() if is_idle(session)]
