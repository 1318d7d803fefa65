"""A ledger and a proxy that speak the wire schemas, scripted by the test. No model behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from areal_hpc.rundir import rendezvous
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropRequest,
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
    SealReply,
    SetRewardReply,
    SetRewardRequest,
    StartSessionReply,
    StartSessionRequest,
)

KEY = "stand-in-admin-key"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """An HTTP server published under a name; it can be killed and comes back elsewhere."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._runner: web.AppRunner | None = None

    def routes(self) -> dict[str, Handler]:
        raise NotImplementedError

    async def start(self) -> None:
        app = web.Application()
        for path, handler in self.routes().items():
            app.router.add_post(path, handler)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        rendezvous.publish_endpoint(self._directory, self._name, f"http://127.0.0.1:{port}")

    async def kill(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()


def answer(reply: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(reply), content_type="application/json", status=status
    )


def key_of(request: web.Request) -> str:
    return request.headers["Authorization"].removeprefix("Bearer ")


@dataclass
class LedgerScript:
    """What the ledger hands out, and everything it was told. Outlives its restarts."""

    queue: list[TicketGrant] = field(default_factory=list)
    leased: dict[TicketRef, TicketGrant] = field(default_factory=dict)
    finished: set[TicketRef] = field(default_factory=set)
    dropped: dict[TicketRef, str] = field(default_factory=dict)
    filtered: dict[TicketRef, str] = field(default_factory=dict)
    evaluated: dict[TicketRef, list[float]] = field(default_factory=dict)
    requests: list[LeaseRequest] = field(default_factory=list)
    heard_at_s: list[float] = field(default_factory=list)
    """When each of them came, by the clock of the event loop."""
    seal_now: bool = False
    pause_s: float = 0.25
    stop_when_done: bool = True
    signalled_at: float = 0.0

    @property
    def open(self) -> int:
        return len(self.queue) + len(self.leased)


class StandInLedger(Service):
    def __init__(self, directory: Path, script: LedgerScript) -> None:
        super().__init__(directory, "ledger")
        self.script = script
        self.refuse_leases = False

    def routes(self) -> dict[str, Handler]:
        return {"/lease": self.lease, "/drop": self.drop, "/report_evaluation": self.evaluated}

    async def lease(self, request: web.Request) -> web.Response:
        assert key_of(request) == KEY
        if self.refuse_leases:
            raise web.HTTPForbidden(text="an older generation")
        asked = msgspec.json.decode(await request.read(), type=LeaseRequest)
        script = self.script
        script.requests.append(asked)
        script.heard_at_s.append(asyncio.get_running_loop().time())
        for ref in asked.finished:
            if script.leased.pop(ref, None):
                script.finished.add(ref)
        give_up_at = asyncio.get_running_loop().time() + asked.wait_s
        while not script.queue and script.open and not script.seal_now:
            if asyncio.get_running_loop().time() >= give_up_at:
                break
            await asyncio.sleep(0.01)
        grants, room = [], asked.capacity
        while script.queue and script.queue[0].n_episodes <= room:
            grant = script.queue.pop(0)
            script.leased[grant.ref] = grant
            room -= grant.n_episodes
            grants.append(grant)
        stop = script.stop_when_done and not script.open
        return answer(LeaseReply(grants, script.seal_now, stop, pause_s=script.pause_s))

    async def drop(self, request: web.Request) -> web.Response:
        told = msgspec.json.decode(await request.read(), type=DropRequest)
        self.script.leased.pop(told.ref, None)
        drops = self.script.filtered if told.kind == "filtered" else self.script.dropped
        drops[told.ref] = told.reason
        return answer(Acknowledged())

    async def evaluated(self, request: web.Request) -> web.Response:
        told = msgspec.json.decode(await request.read(), type=EvaluationResultRequest)
        self.script.leased.pop(told.ref, None)
        self.script.evaluated[told.ref] = told.rewards
        return answer(Acknowledged())


@dataclass
class Session:
    """One session of the stand-in proxy."""

    started: StartSessionRequest
    interactions: list[str] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    ended: bool = False


class StandInProxy(Service):
    """Sessions in memory, lost with the process; `reply` is what the model says to anything."""

    def __init__(self, directory: Path, cell: str = "cell-0", reply: str = "Answer: 4") -> None:
        super().__init__(directory, f"proxy-{cell}")
        self.reply = reply
        self.sessions: dict[str, Session] = {}
        self.finished: dict[TicketRef, list[str]] = {}
        self.discarded: list[TicketRef] = []
        self.seals = 0
        self.most_open = 0
        self.has_replica = True
        self.unserved_calls = 0
        self.opened = 0
        self.incarnation = 0
        self.script: LedgerScript | None = None

    def routes(self) -> dict[str, Handler]:
        return {
            "/rl/start_session": self.start_session,
            "/rl/set_reward": self.set_reward,
            "/rl/end_session": self.end_session,
            "/rl/finish_ticket": self.finish_ticket,
            "/rl/seal": self.seal,
            "/v1/chat/completions": self.complete,
        }

    async def start(self) -> None:
        self.sessions.clear()
        self.incarnation += 1
        await super().start()

    def session_of(self, request: web.Request) -> Session:
        session = self.sessions.get(key_of(request))
        if session is None:
            raise web.HTTPUnauthorized(text="no such session")
        return session

    async def start_session(self, request: web.Request) -> web.Response:
        assert key_of(request) == KEY
        started = msgspec.json.decode(await request.read(), type=StartSessionRequest)
        self.opened += 1
        name = f"{self.incarnation}-{self.opened}"
        self.sessions[name] = Session(started)
        open_now = sum(not one.ended for one in self.sessions.values())
        self.most_open = max(self.most_open, open_now)
        return answer(StartSessionReply(name, name))

    async def complete(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        if not self.has_replica:
            self.unserved_calls += 1
            raise web.HTTPServiceUnavailable(text="no replica is available")
        await request.read()
        name = f"chatcmpl-{len(session.interactions)}"
        session.interactions.append(name)
        return web.json_response(completion(name, self.reply))

    async def set_reward(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        told = msgspec.json.decode(await request.read(), type=SetRewardRequest)
        known = session.interactions
        if not known:
            raise web.HTTPBadRequest(text="the session has no interaction")
        name = told.interaction_id or known[-1]
        if name not in known:
            raise web.HTTPBadRequest(text=f"no interaction {name}; known: {known}")
        session.rewards[name] = told.reward
        return answer(SetRewardReply(name))

    async def end_session(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        session.ended = True
        rewarded = [session.rewards[one] for one in session.interactions if one in session.rewards]
        reward = rewarded[-1] if rewarded else None
        count, replicas = len(session.interactions), int(self.has_replica)
        return answer(EndSessionReply("ended", count, reward, replicas))

    async def finish_ticket(self, request: web.Request) -> web.Response:
        assert key_of(request) == KEY
        told = msgspec.json.decode(await request.read(), type=FinishTicketRequest)
        if told.discard:
            assert not told.session_ids
            self.discarded.append(told.ref)
            return answer(FinishTicketReply(0))
        unknown = [one for one in told.session_ids if one not in self.sessions]
        if unknown:
            raise web.HTTPNotFound(text=f"no sessions {unknown}")
        assert all(self.sessions[one].ended for one in told.session_ids)
        self.finished[told.ref] = told.session_ids
        return answer(FinishTicketReply(len(told.session_ids)))

    async def seal(self, request: web.Request) -> web.Response:
        self.seals += 1
        if self.script is not None:
            self.script.seal_now = False
            for ref in self.finished:  # settled before the answer
                if self.script.leased.pop(ref, None):
                    self.script.finished.add(ref)
        return answer(SealReply(len(self.finished)))


def completion(name: str, text: str) -> dict[str, Any]:
    """A chat completion as the OpenAI SDK expects it."""
    return {
        "id": name,
        "object": "chat.completion",
        "created": 0,
        "model": "stand-in",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
