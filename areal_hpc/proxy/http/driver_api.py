"""Routes for rollout drivers: sessions, rewards, finished tickets."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TypeVar

import msgspec

from areal_hpc.errors import InvalidRewardError, RequestError
from areal_hpc.proxy.engine.router import Router
from areal_hpc.proxy.sessions.events import (
    InteractionAdded,
    RewardSet,
    SessionDropped,
    SessionEnded,
    SessionOpened,
    TicketFinished,
)
from areal_hpc.proxy.sessions.online_slots import OnlineSlots
from areal_hpc.proxy.sessions.recorder import JournaledRecorder, UnsoundCallError
from areal_hpc.proxy.sessions.sealing import Sealer
from areal_hpc.proxy.sessions.store import Session, generate_key, hash_key
from areal_hpc.session.credit import assign_credit, find_retry_orphans
from areal_hpc.session.export import plan_all_rows, to_batch
from areal_hpc.session.rewards import find_rewarded_interaction, get_final_reward, validate_reward
from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import (
    AwaitSessionReply,
    AwaitSessionRequest,
    EndSessionReply,
    ExportedInteraction,
    ExportReply,
    ExportRequest,
    FinishTicketReply,
    FinishTicketRequest,
    GrantCapacityReply,
    OfferEpisodeReply,
    OfferEpisodeRequest,
    ProxyHealth,
    RecordReply,
    RecordRequest,
    SealReply,
    SetRewardReply,
    SetRewardRequest,
    StartSessionReply,
    StartSessionRequest,
)
from areal_hpc.wire.weight_version import WeightVersion

Body = TypeVar("Body")
MIN_KEY_CHARS = 16
ENDED_POLL_S = 0.05
MAX_WAIT_S = 60.0


class DriverApi:
    """Answers drivers. Every method takes a request's body and returns the reply's."""

    def __init__(
        self,
        recorder: JournaledRecorder,
        router: Router,
        sealer: Sealer | None,
        max_sessions: int,
        visits: OnlineSlots | None = None,
    ) -> None:
        """Prepare.

        Args:
            recorder: Of the sessions.
            router: Its replicas count for `health`.
            sealer: None when the proxy serves no run: then there are no tickets.
            max_sessions: Open at once.
            visits: Of an online run: sessions that programs open are episodes of its tickets.
        """
        self._book = recorder.book
        self._recorder = recorder
        self._router = router
        self._sealer = sealer
        self._most_sessions = max_sessions
        self._visits = visits

    def start_session(self, body: bytes) -> bytes:
        """Open a session and hand out its key."""
        request = _decode(body, StartSessionRequest)
        if request.ref is not None:
            self._of_run()
        key = self._free_key(request.api_key) if request.api_key else generate_key()
        sessions, most = self._book.sessions, self._most_sessions
        if len(sessions) >= most and sum(not one.ended for one in sessions.values()) >= most:
            raise RequestError(429, f"too many open sessions (limit {most})")
        if self._visits is None or request.ref is not None or request.disposable:
            return msgspec.json.encode(StartSessionReply(self._open(request, key), key))
        offer = self._visits.take()
        session_id = self._open(offer.request.session, key)
        offer.taken.set_result(session_id)
        return msgspec.json.encode(StartSessionReply(session_id, key, offer.request.task))

    def _open(self, request: StartSessionRequest, key: str) -> str:
        session_id = f"{request.task_id}-{secrets.token_hex(6)}"
        request = msgspec.structs.replace(request, api_key="")
        self._recorder.record(SessionOpened(session_id, hash_key(key), request))
        return session_id

    async def offer_episode(self, body: bytes) -> bytes:
        """Wait for a program that plays an episode of a ticket."""
        request = _decode(body, OfferEpisodeRequest)
        if self._visits is None:
            raise RequestError(404, "this proxy has no online mode")
        return msgspec.json.encode(OfferEpisodeReply(await self._visits.offer(request)))

    async def await_session(self, body: bytes) -> bytes:
        """Tell when a session of a ticket has ended."""
        request = _decode(body, AwaitSessionRequest)
        give_up_at = time.monotonic() + min(request.wait_s, MAX_WAIT_S)
        while True:
            session = self._book.sessions.get(request.session_id)
            if session is None:
                raise RequestError(
                    404, f"there is no session {request.session_id!r}", key="session_id"
                )
            if session.ended or time.monotonic() >= give_up_at:
                reply = AwaitSessionReply(session.ended, get_final_reward(session.tree))
                return msgspec.json.encode(reply)
            await asyncio.sleep(ENDED_POLL_S)

    def _free_key(self, key: str) -> str:
        if len(key) < MIN_KEY_CHARS:
            raise RequestError(
                400, f"session keys need at least {MIN_KEY_CHARS} characters", key="api_key"
            )
        session = self._book.session_of_key(key)
        if session is not None and not session.ended:
            raise RequestError(
                409, f"this key already opens session {session.session_id!r}", key="api_key"
            )
        return key

    def grant_capacity(self, body: bytes) -> bytes:
        """Let one more session be open at once."""
        self._most_sessions += 1
        return msgspec.json.encode(GrantCapacityReply(self._most_sessions))

    async def export_trajectories(self, body: bytes) -> bytes:
        """A session's rows, as soon as it has ended; then it is forgotten with its key."""
        request = _decode(body, ExportRequest)
        session = self._exportable(request.session_id)
        while not session.ended:
            await asyncio.sleep(ENDED_POLL_S)
            session = self._exportable(request.session_id)
        reply = msgspec.json.encode(ExportReply(export_interactions(session.tree, request)))
        self._recorder.record(SessionDropped(session.session_id))
        return reply

    def _exportable(self, session_id: str) -> Session:
        session = self._book.sessions.get(session_id)
        if session is None:
            raise RequestError(404, f"there is no session {session_id!r}", key="session_id")
        if session.request.ref is not None:
            raise RequestError(
                409,
                f"session {session_id!r} belongs to a ticket and cannot be exported",
                key="session_id",
            )
        return session

    def set_reward(self, session: Session, body: bytes) -> bytes:
        """Reward the named interaction, or the last one."""
        request = _decode(body, SetRewardRequest)
        if session.ended:
            raise RequestError(403, "the session has ended")
        try:
            interaction = find_rewarded_interaction(session.tree, request.interaction_id)
            reward = validate_reward(request.reward)
        except InvalidRewardError as error:
            raise RequestError(400, str(error), key="reward") from error
        self._recorder.record(RewardSet(session.session_id, interaction.interaction_id, reward))
        return msgspec.json.encode(SetRewardReply(interaction.interaction_id))

    def record(self, session: Session, body: bytes) -> bytes:
        """Take in model calls that a client of the driver recorded. Repeating it is harmless."""
        request = _decode(body, RecordRequest)
        if session.ended:
            raise RequestError(403, "the session has ended")
        for raw in request.interactions:
            one = _decode(bytes(raw), Interaction)
            if one.interaction_id in session.tree:
                continue
            self._refuse_unknown_version(one)
            try:
                self._recorder.record(InteractionAdded(session.session_id, one))
            except UnsoundCallError as error:
                problem = f"interaction {one.interaction_id!r:.300}: {error}"
                raise RequestError(400, problem, key="interactions") from error
        return msgspec.json.encode(RecordReply(len(session.tree)))

    def _refuse_unknown_version(self, one: Interaction) -> None:
        known = self._router.newest_version
        newest = max((span.version for span in one.spans), default=0)
        if newest <= known:
            return
        name = f"interaction {one.interaction_id!r:.300}"
        versions = WeightVersion.unpack(known), WeightVersion.unpack(newest)
        problem = f"expected weights up to version {versions[0]}, the newest known to this cell"
        if known == 0 and self._router.serving_count == 0:  # restarted just now
            raise RequestError(503, f"{name}: no replica has said yet which weights it serves")
        raise RequestError(400, f"{name}: {problem}, got {versions[1]}", key="interactions")

    def end_session(self, session: Session, body: bytes) -> bytes:
        """Close the session to requests. Repeating it is harmless."""
        if not session.ended:
            self._recorder.record(SessionEnded(session.session_id))
        self._router.forget(session.session_id)
        reply = EndSessionReply(
            "ended", len(session.tree), get_final_reward(session.tree), self._router.serving_count
        )
        return msgspec.json.encode(reply)

    def finish_ticket(self, body: bytes) -> bytes:
        """Hand the ticket's sessions to the sealer. Repeating it is harmless."""
        sealer = self._of_run()
        request = _decode(body, FinishTicketRequest)
        rows = self._book.rows_of(request.ref)
        if request.discard:
            rows = self._discard(request.ref, rows)
        if rows is None:
            rows = self._finish(request)
            sealer.wake()
        return msgspec.json.encode(FinishTicketReply(rows))

    def _discard(self, ref: TicketRef, rows: int | None) -> int:
        """Forget what a filtered ticket's episodes said."""
        if rows is not None:
            raise RequestError(
                409, f"{ref} is finished; its rows cannot be discarded", key="discard"
            )
        for session in [*self._book.sessions.values()]:
            if session.request.ref == ref:
                self._recorder.record(SessionDropped(session.session_id))
        return 0

    def _finish(self, request: FinishTicketRequest) -> int:
        if not request.session_ids:
            raise RequestError(400, "a ticket has one session at least", key="session_ids")
        for session_id in request.session_ids:
            session = self._book.sessions.get(session_id)
            if session is None:
                raise RequestError(404, f"there is no session {session_id!r}", key="session_ids")
            if session.request.ref != request.ref or not session.is_recorded:
                raise RequestError(
                    409, f"session {session_id!r} is not one of this ticket", key="session_ids"
                )
            if not session.ended:
                raise RequestError(409, f"session {session_id!r} is open", key="session_ids")
            if get_final_reward(session.tree) is None:
                raise RequestError(
                    409,
                    f"session {session_id!r} has no reward",
                    key="session_ids",
                    hint="set a reward before the session ends",
                )
        self._recorder.record(
            TicketFinished(request.ref, list(dict.fromkeys(request.session_ids)), time.time())
        )
        return self._book.finished[request.ref].row_count

    async def seal(self, body: bytes) -> bytes:
        """Seal and settle what is finished."""
        return msgspec.json.encode(SealReply(await self._of_run().seal_now()))

    def _of_run(self) -> Sealer:
        if self._sealer is None:
            raise RequestError(404, "this proxy runs without a run and has no tickets")
        return self._sealer

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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, str(error)) from error


def export_interactions(
    tree: InteractionTree, request: ExportRequest
) -> dict[str, ExportedInteraction]:
    """Rows by the id of the interaction they end with.

    Raises:
        RequestError: The discount is no finite number.
    """
    orphans = find_retry_orphans(tree) if request.drop_retry_orphans else frozenset()
    try:
        earned = assign_credit(tree, request.discount, request.credit, orphans)
    except InvalidRewardError as error:
        raise RequestError(400, str(error), key="discount") from error
    rewards = {name: earnings.total for name, earnings in earned.items()}
    rows = {}
    for plan in plan_all_rows(tree, request.style, rewards):
        name = plan.path[-1].interaction_id
        batch = {key: array.tolist() for key, array in to_batch(plan).items()}
        rows[name] = ExportedInteraction(name, rewards[name], batch)
    return rows
