"""Auxiliary conversations: served, recorded with the reason, and never learned from."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI

from areal_hpc.rollout.episodes.auxiliary import load_auxiliary_rule
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.episodes.http_client import make_http_client
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import MarkAuxiliaryRequest, StartSessionRequest
from areal_hpc.wire.trajectory import RowKind
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

HERE = "tests.contract.proxy.test_auxiliary"
TITLE = "You are a title generator. You output a title and nothing else."
RULES = ["drop", f"{HERE}:find_auxiliary"]


@pytest.fixture
def stage(small_stage: Stage) -> Stage:
    small_stage.sglang.script = lambda request: Script()
    return small_stage


def find_auxiliary(conversation: dict[str, Any]) -> str | None:
    return "a title" if "title" in conversation["messages"][0]["content"] else None


class TitledAgent:
    """Asks for a title after the task."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        messages: list[Any] = [{"role": "user", "content": "work"}]
        reply = await client.chat.completions.create(model="default", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="default", messages=messages)
        asked: list[Any] = [
            {"role": "system", "content": TITLE},
            {"role": "user", "content": "work"},
        ]
        await client.chat.completions.create(model="default", messages=asked)
        if self.fails:
            raise ValueError("it breaks")
        return 0.5


def play(stage: Stage, ref: TicketRef, rule: str, **more: Any) -> EpisodeOutcome:
    async def run() -> EpisodeOutcome:
        proxy = AsyncServiceClient(stage.paths.rendezvous_dir, "proxy-cell-0", stage.service_key)
        http_client = make_http_client(60.0)
        session = StartSessionRequest("task", ref, rights="calls")
        spec = EpisodeSpec(
            session, {}, 60.0, more.get("reward"), auxiliary=load_auxiliary_rule(rule)
        )
        try:
            return await run_episode(spec, TitledAgent("reward" in more), proxy, http_client)
        finally:
            await http_client.aclose()
            await proxy.close()

    return asyncio.run(run())


@pytest.mark.parametrize("rule", RULES)
def test_a_title_call_is_recorded_and_earns_nothing(
    stage: Stage, ref: TicketRef, rule: str
) -> None:
    outcome = play(stage, ref, rule)
    assert (outcome.status, outcome.reward) == ("ok", 0.5)
    assert stage.finish_ticket(ref, outcome.session_id) == 1
    stage.seal()
    task, title = stage.sealed_rows(ref)
    assert (task.kind, task.row, task.reward) == (RowKind.TRAIN, 0, 0.5)
    assert (title.kind, title.row, title.reward) == (RowKind.AUXILIARY, 1, 0.0)
    said = "OpenCode: title of the session" if rule == "drop" else "a title"
    assert (task.record.auxiliary_reason, title.record.auxiliary_reason) == ("", said)
    assert title.meta["messages"][0]["content"] == TITLE
    assert [call.reward for call in title.record.calls] == [None]
    assert all(
        call.id not in one.followers for call in title.record.calls for one in task.record.calls
    )


def test_the_reward_of_a_failed_episode_goes_to_its_task(stage: Stage, ref: TicketRef) -> None:
    outcome = play(stage, ref, "drop", reward=-1.0)
    assert (outcome.status, outcome.has_failure_reward) == ("failed", True)
    assert stage.finish_ticket(ref, outcome.session_id) == 1
    stage.seal()
    kinds = {row.kind: row.reward for row in stage.sealed_rows(ref)}
    assert kinds == {RowKind.TRAIN: -1.0, RowKind.AUXILIARY: 0.0}


def test_what_is_marked_survives_kill_9(own_stage: Stage, ref: TicketRef) -> None:
    stage = own_stage
    stage.sglang.script = lambda request: Script()
    session_id, key = stage.open_session(ref)
    task, title = (stage.ask(key, text).json()["id"] for text in ("work", "title"))
    mark: Callable[..., Any] = lambda **why: stage.post(  # noqa: E731
        "/rl/mark_auxiliary", MarkAuxiliaryRequest(session_id, why["reasons"])
    )
    assert mark(reasons={"unknown": "x"}).status_code == 400
    assert mark(reasons={title: "a title"}).json() == {"conversations": 1}
    refusal = stage.post("/rl/set_reward", {"reward": 1.0, "interaction_id": title}, key)
    assert refusal.status_code == 400
    assert "of an auxiliary conversation (a title)" in refusal.text
    stage.restart_proxy()
    reply = stage.post("/rl/set_reward", {"reward": 1.0}, key)
    assert reply.json() == {"interaction_id": task}
    assert mark(reasons={task: "too late"}).status_code == 409
    stage.end_session(key)
    assert mark(reasons={title: "a title"}).status_code == 409
    assert stage.finish_ticket(ref, session_id) == 1


def test_an_exported_session_names_its_auxiliary_conversations(stage: Stage) -> None:
    session_id, key = stage.open_session()
    task, title = (stage.ask(key, text).json()["id"] for text in ("work", "title"))
    stage.post("/rl/mark_auxiliary", MarkAuxiliaryRequest(session_id, {title: "a title"}))
    stage.finish_session(key, 1.0)
    told = stage.post("/export_trajectories", {"session_id": session_id}).json()
    assert [*told["interactions"]] == [task]
    assert told["auxiliary"] == {title: "a title"}
