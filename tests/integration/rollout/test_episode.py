"""Episodes run before a stand-in proxy, and failed ones may earn a reward before the real one."""

import asyncio
import dataclasses
import errno
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from openai import AsyncOpenAI

from areal_hpc.errors import AgentError, SandboxStartError, WorkerStartError
from areal_hpc.rollout.agent import Agent, make_http_client
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, parse_agent_rewards, run_episode
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.execution.agent_sandboxes import AgentSandboxes
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.sandbox.runtimes import HostRuntime
from areal_hpc.sandbox.sandbox import Sandbox, SandboxSpec
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import SamplingDefaults, StartSessionRequest
from areal_hpc.wire.trajectory import RowKind
from tests.integration.rollout.standins import StandInProxy, driving
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import CELL

Result = TypeVar("Result")

TASK = {"messages": [{"role": "user", "content": "2 + 2 ="}], "answer": "4"}


def finish(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, scaled(100)))


async def ask(extra_kwargs: dict[str, Any]) -> str:
    """Make one model call without an SDK, and return the id of the completion."""
    reply = await extra_kwargs["http_client"].post(
        f"{extra_kwargs['base_url']}/chat/completions",
        json={"model": "default", "messages": TASK["messages"]},
        headers={"Authorization": f"Bearer {extra_kwargs['api_key']}"},
    )
    reply.raise_for_status()
    name: str = reply.json()["id"]
    return name


class Ends:
    """Agent that calls the model `calls` times, then returns or raises its value."""

    def __init__(self, how: Any, calls: int = 1) -> None:
        self.how = how
        self.calls = calls

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        for _ in range(self.calls):
            await ask(extra_kwargs)
        if isinstance(self.how, BaseException):
            raise self.how
        return self.how


class MakesOwnClient:
    """Agent whose client knows no key."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        AsyncOpenAI(base_url="http://127.0.0.1:9/v1")


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


async def play_all(
    run_dir: Path, agent: Agent, *specs: EpisodeSpec, sandboxes: AgentSandboxes | None = None
) -> tuple[list[EpisodeOutcome], StandInProxy]:
    """Play episodes side by side before a stand-in proxy, as a driver runs them."""
    try:
        async with StandInProxy(run_dir) as proxy, driving(run_dir) as (peer, http_client):
            episodes = (run_episode(spec, agent, peer, http_client, sandboxes) for spec in specs)
            return await asyncio.gather(*episodes), proxy
    finally:
        if isinstance(agent, SubprocessAgent):
            agent.close()
        if sandboxes is not None:
            await sandboxes.close()


async def play(
    run_dir: Path, agent: Agent, timeout_s: float = 60.0
) -> tuple[EpisodeOutcome, StandInProxy]:
    (outcome,), proxy = await play_all(run_dir, agent, spec(timeout_s))
    return outcome, proxy


@pytest.mark.parametrize(
    ("returned", "rewards", "reward"),
    [
        (0.25, {"chatcmpl-2": 0.25}, 0.25),
        ({"chatcmpl-1": 0.5, "chatcmpl-0": -1.0}, {"chatcmpl-1": 0.5, "chatcmpl-0": -1.0}, 0.5),
        (Reward(0.25, parts={"a": 1}), {"chatcmpl-2": 0.25}, 0.25),
        ({"chatcmpl-1": Reward(0.5, note="so")}, {"chatcmpl-1": 0.5}, 0.5),
    ],
    ids=["float", "dict", "reward", "dict of rewards"],
)
def test_a_float_rewards_the_last_interaction_and_a_dict_each_that_it_names(
    tmp_path: Path, returned: Any, rewards: dict[str, float], reward: float
) -> None:
    outcome, proxy = finish(play(tmp_path, Ends(returned, calls=3)))
    (session,) = proxy.sessions.values()
    assert outcome == EpisodeOutcome("ok", outcome.session_id, reward=reward)
    assert session.rewards == rewards
    assert [*session.given.values()] == [*parse_agent_rewards(returned).values()]
    assert session.ended
    started = session.started
    assert (started.ref, started.episode, started.seed) == (TicketRef(3, 0), 1, 11)
    assert started.sampling.temperature == 0.7


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (Ends(None), "returned None (NoneType), expected a finite float"),
        (Ends(1.0, calls=0), "the agent made no model call, so there is nothing to reward"),
        (Ends(1.0, calls=0), "call the model at the `base_url`"),
        (MakesOwnClient(), "call the model at the `base_url`"),
        (Ends("1.0"), f"at: {__file__}:{Ends.run.__code__.co_firstlineno}"),
        (Ends({"chatcmpl-9": 1.0}), "no interaction chatcmpl-9"),
        (Ends(ValueError("no luck")), "the agent raised ValueError: no luck"),
        (Ends(ValueError("no luck")), "    raise self.how\n"),
        (Ends(SystemExit(3)), "the agent raised SystemExit: 3"),
        (Ends(ValueError("half an emoji: \ud83d")), "half an emoji: \\ud83d"),
        (Ends(AgentError("as a worker tells it", trace="half: \ud83d")), "half: \\ud83d"),
        (Ends(asyncio.CancelledError()), "the agent cancelled itself"),
        (Ends(TimeoutError("slow tool")), "the agent raised TimeoutError: slow tool"),
    ],
)
def test_failure_of_the_agent_is_an_outcome(tmp_path: Path, agent: Agent, message: str) -> None:
    outcome, proxy = finish(play(tmp_path, agent))
    assert outcome.status == "failed"
    assert message in outcome.reason
    assert len(outcome.reason.encode()) < 2000, "it travels as UTF-8"
    assert all(session.ended for session in proxy.sessions.values())


def test_an_error_that_only_mentions_a_key_gets_no_hint_about_the_endpoint(tmp_path: Path) -> None:
    error = TypeError("search() got an unexpected keyword argument 'api_key'")
    outcome, _ = finish(play(tmp_path, Ends(error, calls=0)))
    assert str(error) in outcome.reason
    assert "base_url" not in outcome.reason


def make_wrapped_error() -> Exception:
    """Make the error that an SDK raises when it cannot open a connection."""
    error = ConnectionError("Connection error.")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            WorkerStartError("no process for the gym", hint="wait"),
            "no process for the gym\n  try: w",
        ),
        (SandboxStartError("no sandbox"), "no sandbox"),
        (make_wrapped_error(), "Too many open files while the agent ran: ConnectionError: Connect"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device while the age"),
        (
            RuntimeError("can't start new thread"),
            "Resource temporarily unavailable while the agent",
        ),
    ],
    ids=["worker", "sandbox", "descriptor", "disk", "thread"],
)
def test_what_the_node_lacks_is_neither_the_agents_fault_nor_rewarded(
    tmp_path: Path, error: Exception, message: str
) -> None:
    rewarded = dataclasses.replace(spec(), failure_reward=0.0)
    (outcome,), proxy = finish(play_all(tmp_path, Ends(error), rewarded))
    assert (outcome.status, outcome.is_node_short, outcome.error) == ("interrupted", True, None)
    assert outcome.reason.startswith(message)
    (session,) = proxy.sessions.values()
    assert session.ended
    assert not session.rewards


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (Sandbox, "open_model_endpoint", OSError(errno.EMFILE, "Too many open files")),
        (HostRuntime, "start", RuntimeError("can't start new thread")),
    ],
    ids=["no descriptor for the endpoint", "no thread for the start"],
)
def test_a_sandbox_for_which_the_node_lacks_something_ends_the_episode_and_no_driver(
    tmp_path: Path, owner: type, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(owner, method, fail)

    async def play_in_sandbox() -> tuple[list[EpisodeOutcome], StandInProxy]:
        sandboxes = AgentSandboxes(HostRuntime(), SandboxSpec(network="open"), 0)
        return await play_all(tmp_path, Ends(1.0), spec(), sandboxes=sandboxes)

    (outcome,), proxy = finish(play_in_sandbox())
    assert (outcome.status, outcome.is_node_short, outcome.error) == ("interrupted", True, None)
    assert all(session.ended for session in proxy.sessions.values())


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_episode_ends_at_its_deadline_in_any_case(tmp_path: Path, stubborn: bool) -> None:
    limit_s = scaled(0.1)

    async def timed() -> EpisodeOutcome:
        agent = Sleeps(stubborn=stubborn)
        episode = asyncio.ensure_future(play(tmp_path, agent, timeout_s=limit_s))
        ended, _ = await asyncio.wait({episode}, timeout=scaled(60))
        agent.is_woken.set()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait({task})
        assert ended, "it waited for an agent that sleeps for ever"
        return episode.result()[0]

    outcome = asyncio.run(timed())
    assert outcome.status == "timed_out"
    waits_at = f"{__file__}:{Sleeps.run.__code__.co_firstlineno + 3}"
    assert outcome.reason == f"took longer than {limit_s:g} s\n  at: {waits_at}"


def test_restart_of_the_proxy_is_not_the_agents_fault(tmp_path: Path) -> None:
    class Unlucky:
        async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
            await ask(extra_kwargs)
            await proxy.kill()
            await proxy.start()
            await ask(extra_kwargs)
            return 1.0

    async def interrupted() -> EpisodeOutcome:
        async with proxy, driving(tmp_path) as (peer, http_client):
            return await run_episode(spec(), Unlucky(), peer, http_client)

    proxy = StandInProxy(tmp_path)
    outcome = finish(interrupted())
    assert outcome.status == "interrupted"
    assert outcome.reason


@pytest.mark.parametrize("has_sdk", [True, False])
@pytest.mark.asyncio
async def test_the_http_client_suits_the_sdk(
    has_sdk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_sdk:
        monkeypatch.setitem(sys.modules, "openai", None)
    http_client = make_http_client(10.0)
    if has_sdk:
        AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", http_client=http_client)
    await http_client.aclose()
    assert (type(http_client).__module__ == "httpx") is not has_sdk


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"))
    stage.speak_in_letters()
    yield stage
    stage.close()


class Lingers:
    """Agent that takes too long after its only call."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(extra_kwargs)
        await asyncio.sleep(1000.0)
        return 1.0


async def play_ticket(stage: Stage, ref: TicketRef, agents: list[Agent]) -> list[EpisodeOutcome]:
    paths, outcomes = stage.paths, []
    async with driving(paths.rendezvous_dir, stage.service_key, f"proxy-{CELL}") as (peer, client):
        for number, agent in enumerate(agents):
            session = StartSessionRequest(
                f"train-{number}", ref, number, SamplingDefaults(), rights="calls"
            )
            timeout_s = scaled(3.0 if isinstance(agent, Lingers) else 60.0)
            spec = EpisodeSpec(session, {}, timeout_s, failure_reward=-0.5)
            outcomes.append(await run_episode(spec, agent, peer, client))
    return outcomes


def test_a_failed_episode_is_sealed_among_those_that_are_trained(stage: Stage) -> None:
    ref = TicketRef(3, 0)
    agents: list[Agent] = [Ends(1.0), Ends(ValueError("no luck"), calls=2), Lingers()]
    outcomes = asyncio.run(play_ticket(stage, ref, agents))
    assert [outcome.status for outcome in outcomes] == ["ok", "failed", "timed_out"]
    assert [outcome.has_failure_reward for outcome in outcomes] == [False, True, True]
    assert [outcome.reward for outcome in outcomes] == [1.0, -0.5, -0.5]
    stage.finish_ticket(ref, *(outcome.session_id for outcome in outcomes))
    assert stage.seal() == 1
    rows = stage.sealed_rows(ref)
    assert {row.kind for row in rows} == {RowKind.TRAIN}
    rewards = {row.episode: row.reward for row in rows}
    assert rewards == {0: 1.0, 1: -0.5, 2: -0.5}
    assert all(row.loss_mask_T.any() for row in rows)
