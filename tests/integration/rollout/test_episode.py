from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, EpisodeSpec, run_episode
from areal_hpc.rollout.episodes.http_client import make_http_client
from areal_hpc.rollout.service_client import ServiceClient
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import SamplingDefaults, StartSessionRequest
from examples.quickstart.agent import ArithmeticAgent
from tests.integration.rollout.standins import KEY, StandInProxy

Result = TypeVar("Result")

TASK = {"messages": [{"role": "user", "content": "2 + 2 ="}], "answer": "4"}


def finish(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, 100))


async def ask(extra_kwargs: dict[str, Any]) -> str:
    """One model call without an SDK; the id of the completion."""
    reply = await extra_kwargs["http_client"].post(
        f"{extra_kwargs['base_url']}/chat/completions",
        json={"model": "default", "messages": TASK["messages"]},
        headers={"Authorization": f"Bearer {extra_kwargs['api_key']}"},
    )
    reply.raise_for_status()
    name: str = reply.json()["id"]
    return name


class Returns:
    """Calls the model `calls` times, then returns what it was told to."""

    def __init__(self, returned: Any, calls: int = 1) -> None:
        self.returned = returned
        self.calls = calls

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        for _ in range(self.calls):
            await ask(extra_kwargs)
        return self.returned


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(extra_kwargs)
        raise self.error


class Sleeps:
    def __init__(self, *, stubborn: bool) -> None:
        self.stubborn = stubborn
        self.is_woken = asyncio.Event()

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        while not self.is_woken.is_set():
            try:
                await self.is_woken.wait()
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
        return 1.0


def spec(timeout_s: float = 60.0) -> EpisodeSpec:
    session = StartSessionRequest("train-3-0-1", TicketRef(3, 0), 1, SamplingDefaults(0.7), 11)
    return EpisodeSpec(session, dict(TASK), timeout_s)


async def play(
    run_dir: Path, agent: Agent, timeout_s: float = 60.0
) -> tuple[EpisodeOutcome, StandInProxy]:
    proxy = StandInProxy(run_dir)
    await proxy.start()
    peer = ServiceClient(run_dir, "proxy-cell-0", KEY)
    http_client = make_http_client(10.0)
    try:
        return await run_episode(spec(timeout_s), agent, peer, http_client), proxy
    finally:
        await http_client.aclose()
        await peer.close()
        await proxy.kill()


def test_float_becomes_the_reward_of_the_last_interaction(tmp_path: Path) -> None:
    outcome, proxy = finish(play(tmp_path, Returns(0.25, calls=3)))
    (session,) = proxy.sessions.values()
    assert outcome == EpisodeOutcome("ok", outcome.session_id, reward=0.25)
    assert session.rewards == {"chatcmpl-2": 0.25}
    assert session.ended


def test_dict_gives_each_named_interaction_its_reward(tmp_path: Path) -> None:
    rewards = {"chatcmpl-1": 0.5, "chatcmpl-0": -1.0}
    outcome, proxy = finish(play(tmp_path, Returns(rewards, calls=3)))
    (session,) = proxy.sessions.values()
    assert session.rewards == rewards
    assert (outcome.status, outcome.reward) == ("ok", 0.5)


def test_session_says_which_ticket_and_how_to_sample(tmp_path: Path) -> None:
    _, proxy = finish(play(tmp_path, Returns(1.0)))
    (session,) = proxy.sessions.values()
    started = session.started
    assert (started.ref, started.episode, started.seed) == (TicketRef(3, 0), 1, 11)
    assert started.sampling.temperature == 0.7


def test_quick_start_agent_is_rewarded_through_the_openai_sdk(tmp_path: Path) -> None:
    outcome, _ = finish(play(tmp_path, ArithmeticAgent()))
    assert (outcome.status, outcome.reward) == ("ok", 1.0)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (Returns(None), "returned None (NoneType), expected a finite float"),
        (Returns(math.nan), "returned nan (float), expected a finite float"),
        (Returns("good"), "returned 'good' (str)"),
        (Returns(1.0, calls=0), "the session has no interaction"),
        (Returns({"chatcmpl-9": 1.0}), "no interaction chatcmpl-9"),
        (Raises(ValueError("no luck")), "the agent raised ValueError: no luck"),
        (Raises(SystemExit(3)), "the agent raised SystemExit: 3"),
        (Raises(ValueError("half an emoji: \ud83d")), "half an emoji: \\ud83d"),
        (Raises(asyncio.CancelledError()), "the agent cancelled itself"),
        (Raises(TimeoutError("slow tool")), "the agent raised TimeoutError: slow tool"),
    ],
)
def test_failure_of_the_agent_is_an_outcome(tmp_path: Path, agent: Agent, said: str) -> None:
    outcome, proxy = finish(play(tmp_path, agent))
    assert outcome.status == "failed"
    assert said in outcome.reason
    assert outcome.reason.encode(), "it travels as UTF-8"
    assert all(session.ended for session in proxy.sessions.values())


def test_failure_carries_the_end_of_the_agents_traceback(tmp_path: Path) -> None:
    outcome, _ = finish(play(tmp_path, Raises(ValueError("no luck"))))
    assert "raise self.error" in outcome.reason
    assert len(outcome.reason) < 2000


@pytest.mark.parametrize("stubborn", [False, True])
def test_episode_ends_at_its_deadline_whatever_the_agent_does(
    tmp_path: Path, stubborn: bool
) -> None:
    async def timed() -> EpisodeOutcome:
        agent = Sleeps(stubborn=stubborn)
        episode = asyncio.ensure_future(play(tmp_path, agent, timeout_s=0.05))
        ended, _ = await asyncio.wait({episode}, timeout=60)
        agent.is_woken.set()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait({task})
        assert ended, "it waited for an agent that sleeps for ever"
        return episode.result()[0]

    outcome = asyncio.run(timed())
    assert outcome.status == "timed_out"
    assert outcome.reason == "took longer than 0.05 s"


def test_restart_of_the_proxy_is_not_the_agents_fault(tmp_path: Path) -> None:
    async def interrupted() -> EpisodeOutcome:
        proxy = StandInProxy(tmp_path)
        await proxy.start()
        peer = ServiceClient(tmp_path, "proxy-cell-0", KEY)

        class Unlucky:
            async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
                await ask(extra_kwargs)
                await proxy.kill()
                await proxy.start()
                await ask(extra_kwargs)
                return 1.0

        http_client = make_http_client(10.0)
        try:
            return await run_episode(spec(), Unlucky(), peer, http_client)
        finally:
            await http_client.aclose()
            await peer.close()
            await proxy.kill()

    outcome = finish(interrupted())
    assert outcome.status == "interrupted"
    assert outcome.reason


def test_http_client_suits_the_installed_sdk() -> None:
    async def build() -> None:
        from openai import AsyncOpenAI

        http_client = make_http_client(10.0)
        AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", http_client=http_client)
        await http_client.aclose()

    finish(build())


def test_http_client_does_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)

    async def build() -> str:
        http_client = make_http_client(10.0)
        await http_client.aclose()
        return type(http_client).__module__

    assert finish(build()) == "httpx"
