"""Routes for drivers and other openers of sessions: sessions, rewards, export, finished tickets."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from areal_hpc.errors import InvalidRewardError, ProxyRequestError, UntrainableCallError
from areal_hpc.proxy.completion.prompts import correct_recorded_sampling
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.limits import refuse_oversized_session
from areal_hpc.proxy.engine.router import Router
from areal_hpc.proxy.http.routes import Route
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.sealing import TicketSealer
from areal_hpc.proxy.sessions.store import (
    ConversationsMarkedAuxiliary,
    RewardSet,
    Session,
    SessionDropped,
    SessionEnded,
    SessionOpened,
    TicketFinished,
    compute_key_digest,
    generate_key,
)
from areal_hpc.session.call_records import find_client_reported_field_defect
from areal_hpc.session.credit import (
    compute_credited_rewards,
    find_conversation_replies,
    find_interaction_to_reward,
    list_conversations,
    parse_reward,
)
from areal_hpc.session.export import (
    build_areal_batch,
    find_replies_without_credit,
    plan_rows_with_unrewarded,
)
from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.wire import proxy as wire
from areal_hpc.wire.decoding import decode_json
from areal_hpc.wire.weight_version import WeightVersion

MIN_KEY_CHARS = 16
SESSION_END_POLL_S = 0.05
MAX_LONG_POLL_S = 60.0
MAX_KEPT_EXPORTED_SESSIONS = 64
"""Latest exported sessions, which are kept for a repeated export."""


@dataclass(slots=True, eq=False)
class _OfferedEpisode:
    request: wire.OfferEpisodeRequest
    taken: asyncio.Future[str] = field(default_factory=asyncio.Future)
    """Id of the session, once a program opened it."""

    @property
    def sort_key(self) -> tuple[int, int, int]:
        session = self.request.session
        ref = session.ref
        return (ref.ticket_id, ref.attempt, session.episode) if ref else (0, 0, session.episode)


class DriverApi:
    """Handlers of drivers' requests. Without a sealer the proxy serves no run and has no tickets.

    With `online`, sessions that programs open are episodes of the run's tickets; those of people
    are with `trains_people`.
    """

    def __init__(
        self,
        recorder: JournaledRecorder,
        router: Router,
        sealer: TicketSealer | None,
        limits: ProxyLimits,
        *,
        online: bool = False,
        trains_people: bool = False,
    ) -> None:
        self._store = recorder.store
        self._recorder = recorder
        self._router = router
        self._sealer = sealer
        self._limits = limits
        self._most_sessions = limits.max_sessions
        self._online, self._trains_people = online, trains_people
        self._free_slots: set[_OfferedEpisode] = set()
        self._exported: dict[str, None] = {}
        """Ids of the sessions exported last, the latest at the end."""

    def list_routes(self) -> Iterator[Route]:
        listing = wire.ListConversationsRequest
        posts: list[tuple[str, Any, Callable[..., Any], type[msgspec.Struct] | None]] = [
            ("/rl/start_session", "admin", self.start_session, wire.StartSessionRequest),
            ("/rl/offer_episode", "driver", self.offer_episode, wire.OfferEpisodeRequest),
            ("/rl/await_session", "driver", self.await_session_end, wire.AwaitSessionEndRequest),
            ("/rl/finish_ticket", "driver", self.finish_ticket, wire.FinishTicketRequest),
            ("/rl/keep_failed", "driver", self.keep_failed, wire.KeepFailedSessionRequest),
            ("/rl/list_conversations", "driver", self.list_conversations, listing),
            ("/rl/mark_auxiliary", "driver", self.mark_auxiliary, wire.MarkAuxiliaryRequest),
            ("/rl/seal", "driver", self.seal_training_tickets, None),
            ("/export_trajectories", "admin", self.export_trajectories, wire.ExportRequest),
            ("/grant_capacity", "admin", self.grant_capacity, None),
            ("/rl/set_reward", "control", self.set_reward, wire.SetRewardRequest),
        ]
        yield from (Route("POST", *row) for row in posts)
        form, record = wire.RecordCallsRequest, self.record_interactions
        yield Route("POST", "/rl/record", "control", record, form, needs_client_that_records=True)
        end = self.end_session
        yield Route("POST", "/rl/end_session", "control", end, is_open_after_session_end=True)
        yield Route("GET", "/healthz", "anyone", self.get_health)

    def start_session(self, request: wire.StartSessionRequest) -> wire.StartSessionReply:
        if request.ref is not None:
            self._require_sealer()
        key = request.api_key or generate_key()
        if len(key) < MIN_KEY_CHARS:
            problem = f"session keys need at least {MIN_KEY_CHARS} characters"
            raise ProxyRequestError(400, problem, key="api_key")
        other = self._store.find_session_by_key(key)
        if other is not None and not other.ended:
            problem = f"this key already opens session {other.session_id!r}"
            raise ProxyRequestError(409, problem, key="api_key")
        sessions, most = self._store.sessions, self._most_sessions
        if len(sessions) >= most and sum(not s.ended for s in sessions.values()) >= most:
            raise ProxyRequestError(429, f"too many open sessions (limit {most})")
        control_key = generate_key() if request.rights == "calls" else ""
        is_own = request.ref is not None or request.disposable
        if not self._online or is_own or (request.is_personal and not self._trains_people):
            session_id = self._open_session(request, key, control_key)
            return wire.StartSessionReply(session_id, key, control_key)
        free = [slot for slot in self._free_slots if not slot.taken.done()]  # done: driver hung up
        if not free:
            problem = "no episode is waiting for an external program now"
            raise ProxyRequestError(429, problem, hint="repeat the request")
        slot = min(free, key=lambda offered: offered.sort_key)
        self._free_slots.discard(slot)
        opened = msgspec.structs.replace(slot.request.session, rights=request.rights)
        session_id = self._open_session(opened, key, control_key)
        slot.taken.set_result(session_id)
        return wire.StartSessionReply(session_id, key, control_key, slot.request.task)

    def _open_session(self, request: wire.StartSessionRequest, key: str, control_key: str) -> str:
        session_id = f"{request.task_id}-{secrets.token_hex(6)}"
        request = msgspec.structs.replace(request, api_key="")
        control_digest = compute_key_digest(control_key) if control_key else b""
        self._recorder.record(
            SessionOpened(session_id, compute_key_digest(key), request, time.time(), control_digest)
        )
        return session_id

    async def offer_episode(self, request: wire.OfferEpisodeRequest) -> wire.OfferEpisodeReply:
        if not self._online:
            raise ProxyRequestError(404, "this proxy has no online mode")
        slot = _OfferedEpisode(request)
        self._free_slots.add(slot)
        try:
            async with asyncio.timeout(min(request.wait_s, MAX_LONG_POLL_S)):
                return wire.OfferEpisodeReply(await slot.taken)
        except TimeoutError:
            was_taken = slot.taken.done() and not slot.taken.cancelled()  # just at the timeout
            return wire.OfferEpisodeReply(slot.taken.result() if was_taken else None)
        finally:
            self._free_slots.discard(slot)

    async def await_session_end(
        self, request: wire.AwaitSessionEndRequest
    ) -> wire.AwaitSessionEndReply:
        give_up_at = time.monotonic() + min(request.wait_s, MAX_LONG_POLL_S)
        while True:
            session = self._require_session(request.session_id)
            if session.ended or time.monotonic() >= give_up_at:
                return wire.AwaitSessionEndReply(session.ended, session.reward)
            await asyncio.sleep(SESSION_END_POLL_S)

    def grant_capacity(self) -> wire.MaxOpenSessionsReply:
        self._most_sessions += 1
        return wire.MaxOpenSessionsReply(self._most_sessions)

    async def export_trajectories(self, request: wire.ExportRequest) -> wire.ExportReply:
        """Wait for a session's end, and export its rows; later the session is deleted with its key.

        The request may be repeated, if the reply was lost with its connection.
        """
        while True:
            session = self._require_session(request.session_id)
            if session.request.ref is not None:
                problem = f"session {request.session_id!r} belongs to a ticket"
                raise ProxyRequestError(409, f"{problem} and cannot be exported", key="session_id")
            if session.ended:
                break
            await asyncio.sleep(SESSION_END_POLL_S)
        rows = build_export_rows(session.tree, request)
        session.is_exported = True
        session.touch()
        self._exported.pop(session.session_id, None)
        self._exported[session.session_id] = None
        while len(self._exported) > MAX_KEPT_EXPORTED_SESSIONS:
            del self._exported[(oldest := next(iter(self._exported)))]
            if oldest in self._store.sessions:
                self._recorder.record(SessionDropped(oldest))
        return wire.ExportReply(
            rows, session.count_uses_of_ignored_params(), dict(session.tree.auxiliary)
        )

    def _require_session(self, session_id: str, key: str = "session_id") -> Session:
        session = self._store.sessions.get(session_id)
        if session is None:
            raise ProxyRequestError(404, f"there is no session {session_id!r}", key=key)
        return session

    def set_reward(self, session: Session, request: wire.SetRewardRequest) -> wire.SetRewardReply:
        try:
            interaction = find_interaction_to_reward(session.tree, request.interaction_id)
            reward = parse_reward(request.reward)
        except InvalidRewardError as error:
            raise ProxyRequestError(400, str(error), key="reward") from error
        self._recorder.record(
            RewardSet(
                session.session_id,
                interaction.interaction_id,
                reward,
                is_named=request.interaction_id is not None,
            )
        )
        return wire.SetRewardReply(interaction.interaction_id)

    def record_interactions(
        self, session: Session, request: wire.RecordCallsRequest
    ) -> wire.RecordCallsReply:
        """Record model calls of a client in the driver. The request may be repeated.

        Only replies from `/generate` to the session are accepted, so that none can be invented.
        """
        for raw in request.interactions:
            try:
                call = decode_json(raw, Interaction)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ProxyRequestError(400, str(error)) from error
            refuse_oversized_session(session, self._limits)
            if call.interaction_id in session.tree:
                continue
            if defect := find_client_reported_field_defect(call):
                problem = f"interaction {call.interaction_id!r:.300}: {defect}"
                raise ProxyRequestError(400, problem, key="interactions")
            self._refuse_unknown_version(call)
            call = correct_recorded_sampling(call, session.request)
            try:
                self._recorder.record_client_call(session, call)
            except UntrainableCallError as error:
                problem = f"interaction {call.interaction_id!r:.300}: {error}"
                raise ProxyRequestError(400, problem, key="interactions") from error
        return wire.RecordCallsReply(len(session.tree))

    def _refuse_unknown_version(self, interaction: Interaction) -> None:
        cell_newest = self._router.newest_version
        newest = max((span.version for span in interaction.spans), default=0)
        if newest <= cell_newest:
            return
        name = f"interaction {interaction.interaction_id!r:.300}"
        versions = WeightVersion.unpack(cell_newest), WeightVersion.unpack(newest)
        problem = f"expected weights up to version {versions[0]}, the newest known to this cell"
        if cell_newest == 0 and self._router.serving_count == 0:  # restarted just now
            raise ProxyRequestError(503, f"{name}: no replica has reported its weight version yet")
        raise ProxyRequestError(400, f"{name}: {problem}, got {versions[1]}", key="interactions")

    def end_session(self, session: Session) -> wire.EndSessionReply:
        """End the session, which then accepts no requests. The request may be repeated."""
        if not session.ended:
            self._recorder.record(SessionEnded(session.session_id, time.time()))
        return wire.EndSessionReply(
            "ended", len(session.tree), session.reward, self._router.serving_count
        )

    def finish_ticket(self, request: wire.FinishTicketRequest) -> wire.FinishTicketReply:
        """Pass the ticket's sessions to the sealer. The request may be repeated."""
        sealer = self._require_sealer()
        ref, rows = request.ref, self._store.count_rows_of_ticket(request.ref)
        if request.discard:
            if rows is not None:
                problem = f"{ref} is finished; its rows cannot be discarded"
                raise ProxyRequestError(409, problem, key="discard")
            for session in [*self._store.sessions.values()]:
                if session.request.ref == ref and not session.failure:
                    self._recorder.record(SessionDropped(session.session_id))
            return wire.FinishTicketReply(0)
        if rows is None:
            rows = self._record_finished_ticket(request)
            sealer.wake()
        return wire.FinishTicketReply(rows)

    def _record_finished_ticket(self, request: wire.FinishTicketRequest) -> int:
        if not request.session_ids:
            raise ProxyRequestError(400, "a ticket has one session at least", key="session_ids")
        for session_id in request.session_ids:
            session = self._require_session(session_id, "session_ids")
            name = f"session {session_id!r}"
            is_own = session.request.ref == request.ref and not session.failure
            if not (is_own and session.must_persist):
                raise ProxyRequestError(409, f"{name} is not one of this ticket", key="session_ids")
            if not session.ended:
                raise ProxyRequestError(409, f"{name} is open", key="session_ids")
            if session.reward is None:
                hint = "set a reward before the session ends"
                raise ProxyRequestError(409, f"{name} has no reward", key="session_ids", hint=hint)
        kept = list(dict.fromkeys(request.session_ids))
        self._recorder.record(TicketFinished(request.ref, kept, time.time()))
        return self._store.finished[request.ref].row_count

    def keep_failed(self, request: wire.KeepFailedSessionRequest) -> wire.KeepFailedSessionReply:
        """Keep an ended session whose episode failed. The request may be repeated."""
        sealer = self._require_sealer()
        if (kept := sealer.find_past_keep_decision(request.session_id)) is not None:
            return wire.KeepFailedSessionReply(kept)
        session = self._require_session(request.session_id)
        name = f"session {request.session_id!r}"
        if session.request.ref is None or not session.must_persist:
            problem = f"{name} is no episode of a ticket"
            raise ProxyRequestError(409, problem, key="session_id")
        if session.request.ref in self._store.finished:
            problem = f"the ticket of {name} is finished"
            raise ProxyRequestError(409, problem, key="session_id")
        if not session.ended:
            raise ProxyRequestError(409, f"{name} is open", key="session_id")
        return wire.KeepFailedSessionReply(sealer.keep_failed(request))

    def list_conversations(
        self, request: wire.ListConversationsRequest
    ) -> wire.ListConversationsReply:
        session = self._require_session(request.session_id)
        return wire.ListConversationsReply(list_conversations(session.tree))

    def mark_auxiliary(self, request: wire.MarkAuxiliaryRequest) -> wire.MarkAuxiliaryReply:
        """Leave conversations of a session out of training. The request may be repeated."""
        session = self._require_session(request.session_id)
        if session.ended:
            problem = f"session {request.session_id!r} has ended"
            raise ProxyRequestError(409, problem, key="session_id")
        for root in request.reasons:
            if root not in session.tree or session.tree[root].parent_id is not None:
                problem = f"no conversation of the session begins with {root!r:.300}"
                raise ProxyRequestError(400, problem, key="reasons")
        roots = session.tree.auxiliary.keys() | request.reasons.keys()
        if any(r.reward is not None for r in find_conversation_replies(session.tree, roots)):
            problem = "a conversation with a reward cannot be auxiliary"
            raise ProxyRequestError(409, problem, key="reasons")
        self._recorder.record(ConversationsMarkedAuxiliary(session.session_id, request.reasons))
        return wire.MarkAuxiliaryReply(len(session.tree.auxiliary))

    async def seal_training_tickets(self) -> wire.SealTicketsReply:
        return wire.SealTicketsReply(await self._require_sealer().seal_training_tickets())

    def _require_sealer(self) -> TicketSealer:
        if self._sealer is None:
            raise ProxyRequestError(404, "this proxy runs without a run and has no tickets")
        return self._sealer

    def get_health(self) -> wire.ProxyHealth:
        return wire.ProxyHealth(
            sessions=len(self._store.sessions),
            requests_in_flight=sum(s.in_flight for s in self._store.sessions.values()),
            unsealed_tickets=len(self._store.finished),
            replicas_serving=self._router.serving_count,
        )


def build_export_rows(
    tree: InteractionTree, request: wire.ExportRequest
) -> dict[str, wire.ExportedInteraction]:
    """Return rows by the id of the interaction that ends them."""
    left_out = find_replies_without_credit(tree, request.drop_retry_orphans)
    try:
        earned = compute_credited_rewards(tree, request.discount, request.credit, left_out)
    except InvalidRewardError as error:
        raise ProxyRequestError(400, str(error), key="discount") from error
    rewards = {reply: reward.total for reply, reward in earned.items()}
    rows = {}
    for plan in plan_rows_with_unrewarded(tree, request.style, rewards):
        last = plan.path[-1].interaction_id
        batch = {name: array.tolist() for name, array in build_areal_batch(plan).items()}
        rows[last] = wire.ExportedInteraction(last, rewards[last], batch)
    return rows
