"""Scripted ledger and proxy that speak the wire schemas, without a model."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web

from areal_hpc.rollout.agent import make_http_client
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.rendezvous import derive_bearer_key
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.session.credit import parse_reward
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropTicketRequest,
    Empty,
    EvaluationResultRequest,
    LeaseReply,
    LeaseRequest,
    TicketGrant,
    TicketRef,
)
from areal_hpc.wire.proxy import (
    EndSessionReply,
    FinishTicketReply,
    FinishTicketRequest,
    KeepFailedSessionReply,
    KeepFailedSessionRequest,
    ProxyHealth,
    SealTicketsReply,
    SetRewardReply,
    SetRewardRequest,
    StartSessionReply,
    StartSessionRequest,
)
from tests.support.scripted_sglang import start_web_app
from tests.support.service_keys import SERVICE_KEY

KEY = SERVICE_KEY
Handler = Callable[[str, Any], Awaitable[object]]
"""(key of the caller, the request) to the reply."""
Look = Callable[[web.Request], Awaitable[web.Response]]


class Service:
    """HTTP server published under a name; it can be killed and returns at another address."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self._name = name
        self._runner: web.AppRunner | None = None

    def routes(self) -> dict[str, tuple[type, Handler]]:
        raise NotImplementedError

    def looks(self) -> dict[str, Look]:
        return {}

    async def start(self) -> None:
        app = web.Application()
        own_key = derive_bearer_key(KEY, self._name)
        for path, (form, handler) in self.routes().items():
            app.router.add_post(path, partial(answer, own_key, form, handler))
        for path, get in self.looks().items():
            app.router.add_get(path, get)
        self._runner, url = await start_web_app(app)
        rendezvous.publish_endpoint(self.directory, self._name, url)

    async def kill(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()


async def answer(own_key: str, form: type, handler: Handler, request: web.Request) -> web.Response:
    key, body = request.headers["Authorization"].removeprefix("Bearer "), await request.read()
    key = KEY if key == own_key else key
    reply = await handler(key, msgspec.json.decode(body, type=form))
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


@asynccontextmanager
async def driving(
    directory: Path, key: str = KEY, name: str = "proxy-cell-0"
) -> AsyncIterator[tuple[AsyncServiceClient, Any]]:
    """Open a client of the service, and the HTTP client of agents, as a driver does."""
    peer, http_client = AsyncServiceClient(directory, name, key), make_http_client(60.0)
    try:
        yield peer, http_client
    finally:
        await http_client.aclose()
        await peer.close()


class StandInLedger(Service):
    """Ledger that grants the queued tickets, and whose record outlives its restarts."""

    def __init__(
        self, directory: Path, queue: list[TicketGrant], *, stop_when_done: bool = True
    ) -> None:
        super().__init__(directory, "ledger")
        self.queue = queue
        self.stop_when_done = stop_when_done
        self.leased: dict[TicketRef, TicketGrant] = {}
        self.finished: set[TicketRef] = set()
        self.dropped: dict[TicketRef, str] = {}
        self.causes: dict[TicketRef, str] = {}
        self.filtered: dict[TicketRef, str] = {}
        self.evaluated: dict[TicketRef, list[float]] = {}
        self.answers: dict[TicketRef, list[str]] = {}
        self.requests: list[LeaseRequest] = []
        self.heard_at_s: list[float] = []
        """Time of each request, by the clock of the event loop."""
        self.seal_now = False
        self.pause_s = 0.25
        self.refuses = False

    @property
    def open(self) -> int:
        return len(self.queue) + len(self.leased)

    def routes(self) -> dict[str, tuple[type, Handler]]:
        return {
            "/lease": (LeaseRequest, self.lease),
            "/drop": (DropTicketRequest, self.drop),
            "/report_evaluation": (EvaluationResultRequest, self.evaluate),
        }

    async def lease(self, key: str, request: LeaseRequest) -> LeaseReply:
        assert key == KEY
        if self.refuses:
            raise web.HTTPForbidden(text="an older generation")
        clock = asyncio.get_running_loop().time
        self.requests.append(request)
        self.heard_at_s.append(clock())
        self.settle(request.finished)
        give_up_at = clock() + request.wait_s
        while not self.queue and self.open and not self.seal_now and clock() < give_up_at:
            await asyncio.sleep(0.01)
        grants, room = [], request.capacity
        while self.queue and self.queue[0].n_episodes <= room:
            grant = self.queue.pop(0)
            self.leased[grant.ref] = grant
            room -= grant.n_episodes
            grants.append(grant)
        stop = self.stop_when_done and not self.open
        return LeaseReply(grants, self.seal_now, stop, pause_s=self.pause_s)

    def settle(self, refs: Iterable[TicketRef]) -> None:
        self.finished.update(ref for ref in refs if self.leased.pop(ref, None))

    async def drop(self, key: str, request: DropTicketRequest) -> Acknowledged:
        self.leased.pop(request.ref, None)
        drops = self.filtered if request.kind == "filtered" else self.dropped
        drops[request.ref], self.causes[request.ref] = request.reason, request.cause
        return Acknowledged()

    async def evaluate(self, key: str, request: EvaluationResultRequest) -> Acknowledged:
        self.leased.pop(request.ref, None)
        self.evaluated[request.ref], self.answers[request.ref] = request.rewards, request.answers
        return Acknowledged()


@dataclass
class Session:
    started: StartSessionRequest
    interactions: list[str] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    given: dict[str, Reward] = field(default_factory=dict)
    """The same rewards with parts, metrics and notes."""
    ended: bool = False


class StandInProxy(Service):
    """Proxy with sessions in memory alone. The model replies `Answer: 4` to anything."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "proxy-cell-0")
        self.sessions: dict[str, Session] = {}
        self.finished: dict[TicketRef, list[str]] = {}
        self.discarded: list[TicketRef] = []
        self.failed: list[KeepFailedSessionRequest] = []
        self.seals = 0
        self.most_open = 0
        self.has_replica = True
        self.unserved_calls = 0
        self.opened = 0
        self.incarnation = 0
        self.ledger: StandInLedger | None = None
        """Ledger that hears of sealed tickets."""

    def routes(self) -> dict[str, tuple[type, Handler]]:
        return {
            "/rl/start_session": (StartSessionRequest, self.start_session),
            "/rl/set_reward": (SetRewardRequest, self.set_reward),
            "/rl/end_session": (Empty, self.end_session),
            "/rl/finish_ticket": (FinishTicketRequest, self.finish_ticket),
            "/rl/keep_failed": (KeepFailedSessionRequest, self.keep_failed),
            "/rl/seal": (Empty, self.seal),
            "/v1/chat/completions": (dict, self.complete),
        }

    def looks(self) -> dict[str, Look]:
        return {"/healthz": self.health}

    async def health(self, request: web.Request) -> web.Response:
        health = ProxyHealth(len(self.sessions), 0, 0, int(self.has_replica))
        return web.Response(body=msgspec.json.encode(health))

    async def start(self) -> None:
        self.sessions.clear()
        self.incarnation += 1
        await super().start()

    def session_of(self, key: str) -> Session:
        session = self.sessions.get(key)
        if session is None:
            raise web.HTTPUnauthorized(text="no such session")
        return session

    def controlled_session_of(self, key: str) -> Session:
        session = self.session_of(key.removeprefix("control-"))
        if (session.started.rights == "calls") != key.startswith("control-"):
            raise web.HTTPForbidden(text="this key opens model calls")
        return session

    async def start_session(self, key: str, started: StartSessionRequest) -> StartSessionReply:
        assert key == KEY
        self.opened += 1
        name = f"{self.incarnation}-{self.opened}"
        self.sessions[name] = Session(started)
        open_now = sum(not session.ended for session in self.sessions.values())
        self.most_open = max(self.most_open, open_now)
        return StartSessionReply(name, name, f"control-{name}" if started.rights == "calls" else "")

    async def complete(self, key: str, request: dict[str, Any]) -> dict[str, Any]:
        session = self.session_of(key)
        if not self.has_replica:
            self.unserved_calls += 1
            raise web.HTTPServiceUnavailable(text="no replica is available")
        name = f"chatcmpl-{len(session.interactions)}"
        session.interactions.append(name)
        message = {"role": "assistant", "content": "Answer: 4"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        envelope = {"object": "chat.completion", "created": 0, "model": "stand-in"}
        return {"id": name, **envelope, "choices": [choice]}

    async def set_reward(self, key: str, request: SetRewardRequest) -> SetRewardReply:
        session = self.controlled_session_of(key)
        names = session.interactions
        if not names:
            raise web.HTTPBadRequest(text="the session has no interaction")
        name = request.interaction_id or names[-1]
        if name not in names:
            raise web.HTTPBadRequest(text=f"no interaction {name}; known: {names}")
        session.given[name] = parse_reward(request.reward)
        session.rewards[name] = session.given[name].value
        return SetRewardReply(name)

    async def end_session(self, key: str, request: Empty) -> EndSessionReply:
        session = self.controlled_session_of(key)
        session.ended = True
        values = [session.rewards[name] for name in session.interactions if name in session.rewards]
        reward = values[-1] if values else None
        count, replicas = len(session.interactions), int(self.has_replica)
        return EndSessionReply("ended", count, reward, replicas)

    async def finish_ticket(self, key: str, request: FinishTicketRequest) -> FinishTicketReply:
        assert key == KEY
        if request.discard:
            assert not request.session_ids
            self.discarded.append(request.ref)
            return FinishTicketReply(0)
        unknown = [name for name in request.session_ids if name not in self.sessions]
        if unknown:
            raise web.HTTPNotFound(text=f"no sessions {unknown}")
        assert all(self.sessions[name].ended for name in request.session_ids)
        self.finished[request.ref] = request.session_ids
        return FinishTicketReply(len(request.session_ids))

    async def keep_failed(self, key: str, body: KeepFailedSessionRequest) -> KeepFailedSessionReply:
        assert key == KEY
        assert self.session_of(body.session_id).ended
        self.failed.append(body)
        return KeepFailedSessionReply(True)

    async def seal(self, key: str, request: Empty) -> SealTicketsReply:
        self.seals += 1
        if self.ledger is not None:
            self.ledger.seal_now = False
            self.ledger.settle(self.finished)  # before the answer
        return SealTicketsReply(len(self.finished))
