"""The routes of drivers: sessions, rewards, finished tickets (`wire/proxy.py`)."""

from __future__ import annotations

import secrets
import time
from typing import TypeVar

import msgspec

from areal_hpc.proxy.events import RewardSet, SessionEnded, SessionOpened, TicketFinished
from areal_hpc.proxy.recorder import Recorder
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.routing import Router
from areal_hpc.proxy.sealing import Sealer
from areal_hpc.proxy.sessions import Session, key_digest, new_key
from areal_hpc.session.rewards import (
    RewardRefused,
    check_reward,
    final_reward,
    rewarded_interaction,
)
from areal_hpc.wire.proxy import (
    EndSessionReply,
    FinishTicketReply,
    FinishTicketRequest,
    ProxyHealth,
    SealReply,
    SetRewardReply,
    SetRewardRequest,
    StartSessionReply,
    StartSessionRequest,
)

Body = TypeVar("Body")


class Control:
    """Answers drivers. Every method takes a request's body and returns the reply's."""

    def __init__(self, recorder: Recorder, router: Router, sealer: Sealer) -> None:
        self._book = recorder.book
        self._recorder = recorder
        self._router = router
        self._sealer = sealer

    def start_session(self, body: bytes) -> bytes:
        """Open a session and hand out its key."""
        request = _decode(body, StartSessionRequest)
        key = new_key()
        session_id = f"{request.task_id}-{secrets.token_hex(6)}"
        self._recorder.record(SessionOpened(session_id, key_digest(key), request))
        return msgspec.json.encode(StartSessionReply(session_id, key))

    def set_reward(self, session: Session, body: bytes) -> bytes:
        """Reward the named interaction, or the last one."""
        request = _decode(body, SetRewardRequest)
        if session.ended:
            raise RequestRefused(403, "the session has ended")
        try:
            interaction = rewarded_interaction(session.tree, request.interaction_id)
            reward = check_reward(request.reward)
        except RewardRefused as error:
            raise RequestRefused(400, str(error), key="reward") from error
        self._recorder.record(RewardSet(session.session_id, interaction.interaction_id, reward))
        return msgspec.json.encode(SetRewardReply(interaction.interaction_id))

    def end_session(self, session: Session, body: bytes) -> bytes:
        """Close the session to requests. Repeating it is harmless."""
        if not session.ended:
            self._recorder.record(SessionEnded(session.session_id))
        self._router.forget(session.session_id)
        reply = EndSessionReply("ended", len(session.tree), final_reward(session.tree))
        return msgspec.json.encode(reply)

    def finish_ticket(self, body: bytes) -> bytes:
        """Hand the ticket's sessions to the sealer. Repeating it is harmless."""
        request = _decode(body, FinishTicketRequest)
        rows = self._book.rows_of(request.ref)
        if rows is None:
            rows = self._finish(request)
        return msgspec.json.encode(FinishTicketReply(rows))

    def _finish(self, request: FinishTicketRequest) -> int:
        if not request.session_ids:
            raise RequestRefused(400, "a ticket has one session at least", key="session_ids")
        for session_id in request.session_ids:
            session = self._book.sessions.get(session_id)
            if session is None:
                raise RequestRefused(404, f"there is no session {session_id!r}", key="session_ids")
            if session.request.ref != request.ref or not session.is_recorded:
                raise RequestRefused(
                    409, f"session {session_id!r} is not one of this ticket", key="session_ids"
                )
            if not session.ended:
                raise RequestRefused(409, f"session {session_id!r} is open", key="session_ids")
            if final_reward(session.tree) is None:
                raise RequestRefused(
                    409,
                    f"session {session_id!r} has no reward",
                    key="session_ids",
                    hint="set a reward before the session ends",
                )
        self._recorder.record(
            TicketFinished(request.ref, list(dict.fromkeys(request.session_ids)), time.time())
        )
        self._sealer.wake()
        return self._book.finished[request.ref].row_count

    async def seal(self, body: bytes) -> bytes:
        """Seal and settle what is finished."""
        return msgspec.json.encode(SealReply(await self._sealer.seal_now()))

    def health(self) -> bytes:
        """Liveness and load."""
        return msgspec.json.encode(
            ProxyHealth(
                sessions=len(self._book.sessions),
                requests_in_flight=sum(s.in_flight for s in self._book.sessions.values()),
                unsealed_tickets=len(self._book.finished),
                replicas_serving=self._router.serving_count,
            )
        )


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise RequestRefused(400, str(error)) from error
