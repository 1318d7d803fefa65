"""Session events, as they are journaled.

A live proxy applies an event after writing it; a restarted one applies what it reads. Nothing
else changes a `SessionStore`, so both arrive at the same state.
"""

import msgspec
from msgspec import Struct

from areal_hpc.session.tree import Interaction
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import SealedTicket, TicketRef
from areal_hpc.wire.proxy import StartSessionRequest


class SessionOpened(Struct, tag="opened", frozen=True):
    """A driver opened a session. Of its keys only digests are kept."""

    session_id: str
    key_digest: bytes
    request: StartSessionRequest
    opened_at: float = 0.0
    """Unix time."""
    control_digest: bytes = b""
    """Of the key that opens rewards and the end; empty: the same key does."""


class InteractionAdded(Struct, tag="interaction", frozen=True):
    session_id: str
    interaction: Interaction
    reply_digest: bytes = b""
    """Of the `ReplySampled` that a client recorded by this; empty: the proxy recorded it."""
    hidden: bool = False
    """It is a Response that its client does not want to be given again (`store: false`)."""


class ResponseHidden(Struct, tag="response_deleted", frozen=True):
    """A client deleted a Response: it stays recorded, and is not given again."""

    session_id: str
    response_id: str


class ReplySampled(Struct, tag="sampled", frozen=True):
    """The session's client got a reply from `/generate`, and may record it once."""

    session_id: str
    digest: bytes
    tokens: int = 0


class RewardSet(Struct, tag="reward", frozen=True):
    """An interaction got a reward; a second one replaces the first."""

    session_id: str
    interaction_id: str
    reward: Reward
    is_named: bool = False
    """The agent named the interaction; else the last one has the reward of the episode."""


class ConversationsMarkedAuxiliary(Struct, tag="auxiliary", frozen=True):
    session_id: str
    reasons: dict[str, str]


class SessionEnded(Struct, tag="ended", frozen=True):
    session_id: str
    ended_at: float = 0.0
    """Unix time."""


class SessionFailed(Struct, tag="failed", frozen=True):
    """The ended session's episode failed: it is kept, but counts for no ticket."""

    session_id: str
    cause: str
    error: str
    failed_at: float


class SessionDropped(Struct, tag="dropped", frozen=True):
    """The session idled too long: nobody will finish it."""

    session_id: str


class TicketFinished(Struct, tag="finished", frozen=True):
    """The named sessions are the ticket's episodes; its other sessions are discarded."""

    ref: TicketRef
    session_ids: list[str]
    finished_at: float


class TicketDropped(Struct, tag="ticket_dropped", frozen=True):
    """The finished ticket cannot become rows. The ledger may not know yet."""

    ref: TicketRef
    reason: str


class TicketsSealed(Struct, tag="sealed", frozen=True):
    """The tickets' rows lie in a sealed, indexed shard. The ledger may not know yet."""

    tickets: list[SealedTicket]


class UntrainedSealed(Struct, tag="untrained_sealed", frozen=True):
    """Rows that are not for training lie in a sealed, indexed shard, or could not be built."""

    refs: list[TicketRef]
    session_ids: list[str]


class TicketsAcknowledged(Struct, tag="settled", frozen=True):
    """The ledger acknowledged the tickets, sealed or dropped."""

    refs: list[TicketRef]


Event = (
    SessionOpened
    | InteractionAdded
    | ResponseHidden
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
