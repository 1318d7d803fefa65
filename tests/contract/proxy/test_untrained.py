"""Held-out, failed and auxiliary conversations are recorded with the reason and never trained."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI

from areal_hpc.rollout.agent import make_http_client
from areal_hpc.rollout.episodes.auxiliary import load_auxiliary_rule
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.shards.index import read_index
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import KeepFailedSessionRequest, MarkAuxiliaryRequest, StartSessionRequest
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script
from tests.support.waiting import wait_for

HELD_OUT = TicketRef(3, 1_000_001, eval_step=4)
CAUSE, ERROR = "KeyError at agent.py:31", "the agent raised KeyError: 'x'\nTraceback: \u2713"


@pytest.fixture
def stage(small_stage: Stage) -> Stage:
    """Start a stage that seals after 0.3 s."""
    small_stage.sglang.script = lambda request: Script()
    small_stage.sglang.requests.clear()
    return small_stage


def await_rows(stage: Stage, session_id: str) -> list[TrajectoryRow]:
    wait_for(lambda: stage.untrained_rows(session_id), 10.0, lambda: stage.log)
    return stage.untrained_rows(session_id)


def play(stage: Stage, ref: TicketRef, **more: Any) -> tuple[str, str]:
    session_id, key = stage.open_session(ref)
    assert stage.ask(key, "hi", **more).status_code == 200
    return session_id, key


def keep_failed(stage: Stage, session_id: str, cause: str = CAUSE) -> dict[str, Any]:
    reply = stage.post("/rl/keep_failed", KeepFailedSessionRequest(session_id, cause, ERROR))
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_a_held_out_episode_is_sealed_and_settled_with_nobody(stage: Stage) -> None:
    settled = len(stage.ledger.settled)
    session_id, key = play(stage, HELD_OUT)
    stage.finish_session(key, 0.5)
    assert stage.finish_ticket(HELD_OUT, session_id) == 1
    (row,) = await_rows(stage, session_id)
    assert (row.kind, row.eval_step, row.ticket_id) == (RowKind.EVALUATION, 4, 3)
    assert (row.reward, row.attempt) == (0.5, 1_000_001)
    assert len(stage.ledger.settled) == settled
    assert stage.finish_ticket(HELD_OUT, session_id) == 1  # the driver may ask again
    (shard,) = (
        entry
        for entry in read_index(stage.paths.shard_index_dir)
        if session_id in [episode.session_id for episode in entry.untrained]
    )
    assert shard.tickets == []


def test_a_failed_episode_is_kept_and_its_ticket_goes_on(stage: Stage, ref: TicketRef) -> None:
    failed, key = play(stage, ref)
    assert stage.ask(key, "another conversation").status_code == 200
    stage.end_session(key)
    assert keep_failed(stage, failed) == keep_failed(stage, failed) == {"kept": True}
    silent, silent_key = stage.open_session(ref)  # failed before it called the model
    stage.end_session(silent_key)
    assert keep_failed(stage, silent) == {"kept": True}
    good, good_key = play(stage, ref)
    stage.finish_session(good_key, 1.0)
    refusal = stage.post("/rl/finish_ticket", {"ref": ref, "session_ids": [failed]})
    assert refusal.status_code == 409
    assert stage.finish_ticket(ref, good) == 1
    first, second = await_rows(stage, failed)
    for row in (first, second):
        assert (row.kind, row.eval_step, row.ticket_id) == (RowKind.FAILED, -1, ref.ticket_id)
        assert (row.record.cause, row.record.error) == (CAUSE, ERROR)
        assert row.loss_mask_T.sum() == 5
    assert second.meta["messages"][0]["content"] == "another conversation"
    assert keep_failed(stage, failed) == {"kept": True}, "it is sealed by now"
    (empty,) = await_rows(stage, silent)
    assert (empty.num_tokens, empty.record.error) == (0, ERROR)
    stage.seal()
    assert [row.kind for row in stage.sealed_rows(ref)] == [RowKind.TRAIN]


def test_discarding_a_ticket_leaves_its_failed_episodes(stage: Stage, ref: TicketRef) -> None:
    session_id, key = play(stage, ref)
    assert (
        stage.post(
            "/rl/keep_failed", KeepFailedSessionRequest(session_id, CAUSE, ERROR)
        ).status_code
        == 409
    )  # still open
    stage.end_session(key)
    keep_failed(stage, session_id)
    body = {"ref": ref, "session_ids": [], "discard": True}
    assert stage.post("/rl/finish_ticket", body).status_code == 200
    assert len(await_rows(stage, session_id)) == 1


@pytest.mark.parametrize(
    "own_stage",
    [{"constants": {"areal_hpc.proxy.sessions.sealing.MAX_KEPT_PER_CAUSE": 4}}],
    indirect=True,
)
def test_so_many_failures_of_one_cause_are_kept_and_no_more(own_stage: Stage) -> None:
    stage = own_stage

    def fail(cause: str = CAUSE) -> bool:
        session_id, key = stage.open_session(TicketRef(5, 0))
        stage.end_session(key)
        kept = [bool(keep_failed(stage, session_id, cause)["kept"]) for _ in range(2)]
        assert kept[0] is kept[1], "the driver may ask again"
        return kept[0]

    assert all(fail() for _ in range(3))
    stage.stop_proxy()  # this seals them
    stage.start_proxy()
    assert [fail(), fail(), fail("ValueError at agent.py:31")] == [True, False, True]
    body = {"session_id": "s", "cause": "x" * 600, "error": ""}
    assert stage.post("/rl/keep_failed", body).status_code == 400


def test_what_is_not_trained_survives_kill_9_and_is_sealed_once(own_stage: Stage) -> None:
    stage = own_stage
    evaluated, key = play(stage, HELD_OUT)
    failed, failed_key = play(stage, TicketRef(5, 0))
    stage.end_session(failed_key)
    keep_failed(stage, failed)
    stage.restart_proxy()
    stage.finish_session(key, 1.0)
    assert stage.finish_ticket(HELD_OUT, evaluated) == 1
    unsealed = stage.journal.read_bytes()
    stage.stop_proxy()
    assert [len(stage.untrained_rows(session_id)) for session_id in (evaluated, failed)] == [1, 1]
    stage.journal.write_bytes(unsealed)  # as if it died before it could note the shard
    stage.start_proxy()
    stage.stop_proxy()
    assert [len(stage.untrained_rows(session_id)) for session_id in (evaluated, failed)] == [1, 1]


def test_a_call_is_recorded_with_its_times_replica_and_parameters(stage: Stage) -> None:
    began = time.time()
    request = StartSessionRequest("task", TicketRef(0, 2, eval_step=5), task_index=17)
    opened = stage.post("/rl/start_session", request).json()
    session_id, key = opened["session_id"], opened["api_key"]
    first = stage.ask(key, "hi", temperature=0.5)
    messages = [
        {"role": "user", "content": "hi"},
        first.json()["choices"][0]["message"],
        {"role": "user", "content": "and?"},
    ]
    more = {"seed": 11, "max_tokens": 9, "temperature": 0.5}
    events = stage.chat(key, messages, stream=True, **more).text
    streamed = json.loads(events.split("data: ")[1])["id"]
    reward = Reward(0.5, {"format": 0.25}, {"tool_errors": 2}, "nearly \u2713")
    assert stage.post("/rl/set_reward", {"reward": reward}, key).status_code == 200
    stage.end_session(key)
    stage.finish_ticket(TicketRef(0, 2, eval_step=5), session_id)
    (row,) = await_rows(stage, session_id)
    record, (call_1, call_2) = row.record, row.record.calls
    assert (record.session_id, record.task_id, record.task_index) == (session_id, "task", 17)
    assert record.cell == "cell-0"
    times = [began, record.started_at, call_1.asked_at, call_1.answered_at, call_2.asked_at]
    times += [call_2.first_token_at, call_2.answered_at, record.ended_at, time.time()]
    assert times == sorted(times)
    assert call_1.first_token_at == 0.0
    assert [call_1.id, call_2.id, call_2.parent_id] == [first.json()["id"], streamed, call_1.id]
    assert [call_1.trained, call_2.trained] == [True, True]
    assert [call_1.reward, call_2.reward] == [None, reward]
    assert [call.replica for call in (call_1, call_2)] == [0, 0]
    assert [call_1.new_messages, call_2.new_messages] == [1, 1]
    assert call_1.prompt_tokens + call_1.reply_tokens < call_2.prompt_tokens
    assert call_2.prompt_tokens + call_2.reply_tokens == row.num_tokens
    sampling = {"temperature": 0.5, "sampling_seed": 11, "max_new_tokens": 9}
    assert {name: call_2.sampling[name] for name in sampling} == sampling


HERE = "tests.contract.proxy.test_untrained"
TITLE = "You are a title generator. You output a title and nothing else."
RULES = ["drop", f"{HERE}:find_auxiliary"]


def find_auxiliary(conversation: dict[str, Any]) -> str | None:
    return "a title" if "title" in conversation["messages"][0]["content"] else None


class TitledAgent:
    """Agent that asks for a title after the task."""

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
        conversation: list[Any] = [
            {"role": "system", "content": TITLE},
            {"role": "user", "content": "work"},
        ]
        await client.chat.completions.create(model="default", messages=conversation)
        if self.fails:
            raise ValueError("it breaks")
        return 0.5


def play_titled(stage: Stage, ref: TicketRef, rule: str, **more: Any) -> EpisodeOutcome:
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
def test_a_call_for_a_title_earns_nothing(stage: Stage, ref: TicketRef, rule: str) -> None:
    outcome = play_titled(stage, ref, rule)
    assert (outcome.status, outcome.reward) == ("ok", 0.5)
    assert stage.finish_ticket(ref, outcome.session_id) == 1
    stage.seal()
    task, title = stage.sealed_rows(ref)
    assert (task.kind, task.row, task.reward) == (RowKind.TRAIN, 0, 0.5)
    assert (title.kind, title.row, title.reward) == (RowKind.AUXILIARY, 1, 0.0)
    expected_reason = "OpenCode: title of the session" if rule == "drop" else "a title"
    assert (task.record.auxiliary_reason, title.record.auxiliary_reason) == ("", expected_reason)
    assert title.meta["messages"][0]["content"] == TITLE
    assert [call.reward for call in title.record.calls] == [None]
    assert all(
        call.id not in turn.followers for call in title.record.calls for turn in task.record.calls
    )


def test_the_reward_of_a_failed_episode_goes_to_its_task(stage: Stage, ref: TicketRef) -> None:
    outcome = play_titled(stage, ref, "drop", reward=-1.0)
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
    export = stage.post("/export_trajectories", {"session_id": session_id}).json()
    assert [*export["interactions"]] == [task]
    assert export["auxiliary"] == {title: "a title"}
