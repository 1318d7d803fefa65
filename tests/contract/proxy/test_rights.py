"""The keys of agents, drivers and outside programs open their own routes alone, online too."""

import http.client
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from areal_hpc.proxy.http.driver_api import MAX_KEPT_EXPORTED_SESSIONS
from areal_hpc.rundir.rendezvous import derive_bearer_key
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import (
    AwaitSessionEndRequest,
    OfferEpisodeReply,
    OfferEpisodeRequest,
    StartSessionRequest,
)
from tests.contract.proxy.talk import QUESTION, turn
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.service_keys import OTHER_SERVICE_KEY

CONTROL_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/rl/set_reward", {"reward": 1e6}),
    ("/rl/end_session", {}),
    ("/rl/record", {"interactions": []}),
]


def open_for_agent(stage: Stage, ref: TicketRef | None = None) -> dict[str, str]:
    """Open a session as a driver and return it with a key for its agent and one for the driver."""
    more = {} if ref is None else {"ref": {"ticket_id": ref.ticket_id, "attempt": ref.attempt}}
    answer = stage.post("/rl/start_session", {"task_id": "task", "rights": "calls", **more})
    reply: dict[str, str] = answer.json()
    return reply


def call(stage: Stage, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return stage.http.post(f"{stage.url}{path}", json=body, headers={"x-api-key": key})


@pytest.mark.parametrize(("path", "body"), CONTROL_CALLS)
def test_an_agents_key_only_opens_calls(path: str, body: dict[str, Any], stage: Stage) -> None:
    opened = open_for_agent(stage)
    assert stage.ask(opened["api_key"], "hi").status_code == 200
    refused = call(stage, opened["api_key"], path, body)
    assert refused.status_code == 403
    assert "rewards and the end need the control_key" in refused.text
    assert stage.ask(opened["api_key"], "hi").status_code == 200, "the session goes on"


def test_a_drivers_key_rewards_and_ends_and_opens_no_calls(stage: Stage, ref: TicketRef) -> None:
    opened = open_for_agent(stage, ref)
    assert stage.ask(opened["api_key"], "hi").status_code == 200
    assert stage.ask(opened["control_key"], "hi").status_code == 401
    stage.kill_proxy()
    stage.start_proxy()
    for path, body in (("/rl/set_reward", {"reward": 0.5}), ("/rl/end_session", {})):
        assert call(stage, opened["control_key"], path, body).status_code == 200
    assert call(stage, opened["control_key"], "/rl/record", {"interactions": []}).status_code == 403
    stage.finish_ticket(ref, opened["session_id"])
    assert stage.seal() == 1
    assert [ticket.rewards for ticket in stage.ledger.settled] == [[0.5]]
    for key in (opened["api_key"], opened["control_key"]):
        assert call(stage, key, "/rl/set_reward", {"reward": 1.0}).status_code == 401


@pytest.mark.parametrize("more", [{}, {"rights": "calls"}, {"rights": "all"}])
def test_an_agent_gets_calls_alone_unless_more_is_asked(stage: Stage, more: dict[str, str]) -> None:
    opened = stage.post("/rl/start_session", {"task_id": "task", **more}, stage.admin_key).json()
    key, control_key = opened["api_key"], opened.get("control_key", "")
    assert bool(control_key) == (more.get("rights") != "all")
    assert stage.ask(key, "hi").status_code == 200
    if control_key:
        assert call(stage, key, "/rl/set_reward", {"reward": 1.0}).status_code == 403
        assert call(stage, key, "/rl/end_session", {}).status_code == 403
    stage.finish_session(control_key or key, 1.0)


KEY = "sk-chosen-by-the-client"


def start(stage: Stage, **more: Any) -> httpx.Response:
    return stage.post("/rl/start_session", {"task_id": "outside", **more})


def two_turns(stage: Stage, key: str) -> tuple[str, str]:
    first = stage.chat(key, QUESTION).json()["id"]
    return first, stage.chat(key, [*QUESTION, *turn("hello world")]).json()["id"]


def export(stage: Stage, session_id: str, **more: Any) -> httpx.Response:
    return stage.post("/export_trajectories", {"session_id": session_id, **more})


def test_a_session_is_exported_under_the_names_of_areal(stage: Stage) -> None:
    session_id, key = stage.open_session()
    assert session_id.startswith("task-")
    first, second = two_turns(stage, key)
    stage.finish_session(key, 1)
    interactions = export(stage, session_id, discount=0.5).json()["interactions"]
    rewards = {name: call["reward"] for name, call in interactions.items()}
    assert rewards == {first: 0.5, second: 1.0}
    for name, call in interactions.items():
        assert call["interaction_id"] == name
        row = {key: np.array(value) for key, value in call["tensor_dict"].items()}
        per_token = {"input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "attention_mask"}
        assert row.keys() == {*per_token, "rewards"}
        assert {row[name].shape for name in per_token} == {row["input_ids"].shape}
        assert row["loss_mask"].sum() == 5
        assert row["rewards"].tolist() == [call["reward"]]
    assert stage.ask(key, "hi").status_code == 403


def test_an_export_whose_reply_was_lost_is_made_again_even_by_another_proxy(stage: Stage) -> None:
    session_id, key = stage.open_session()
    two_turns(stage, key)
    stage.finish_session(key, 1)
    first = export(stage, session_id).json()
    assert export(stage, session_id).json() == first
    stage.restart_proxy()
    assert export(stage, session_id).json() == first


def test_exported_sessions_are_forgotten_when_enough_others_are_exported(stage: Stage) -> None:
    sessions = [stage.open_session() for _ in range(MAX_KEPT_EXPORTED_SESSIONS + 1)]
    for session_id, key in sessions:
        stage.end_session(key)
        assert export(stage, session_id).status_code == 200
    (oldest, its_key), (next_one, next_key) = sessions[:2]
    assert [export(stage, session).status_code for session in (oldest, next_one)] == [404, 200]
    assert [stage.ask(key, "hi").status_code for key in (its_key, next_key)] == [401, 403]


def test_an_export_waits_until_the_session_has_ended(stage: Stage) -> None:
    session_id, key = stage.open_session()
    stage.ask(key, "hi")
    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(export, stage, session_id)
        time.sleep(0.3)
        assert not exporting.done()
        stage.finish_session(key, 0.5)
        assert exporting.result(scaled(10)).status_code == 200


def test_a_session_without_calls_or_rewards_is_exported_too(stage: Stage) -> None:
    session_id, key = stage.open_session()
    stage.end_session(key)
    assert export(stage, session_id).json() == {"interactions": {}}
    session_id, key = stage.open_session()
    stage.ask(key, "hi")
    stage.end_session(key)
    (interaction,) = export(stage, session_id).json()["interactions"].values()
    assert (interaction["reward"], interaction["tensor_dict"]["rewards"]) == (None, [0.0])


def test_a_key_may_be_chosen_and_used_again_after_its_session_ended(stage: Stage) -> None:
    first = start(stage, api_key=KEY).json()
    assert first["api_key"] == KEY
    refused = start(stage, api_key=KEY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "api_key")
    stage.ask(KEY, "hi")
    stage.finish_session(KEY, 1.0)
    assert KEY.encode() not in stage.journal.read_bytes()
    second = start(stage, api_key=KEY).json()
    assert second["session_id"] != first["session_id"]
    assert len(export(stage, first["session_id"]).json()["interactions"]) == 1
    assert stage.ask(KEY, "hi").status_code == 200
    stage.end_session(KEY)
    export(stage, second["session_id"])
    assert start(stage, api_key="short").status_code == 400


def test_the_admin_key_opens_sessions_and_nothing_of_a_driver(stage: Stage) -> None:
    opened = stage.post("/rl/start_session", {"task_id": "try"}, stage.admin_key)
    session_id, key = opened.json()["session_id"], opened.json()["api_key"]
    stage.ask(key, "hi")
    stage.finish_session(opened.json()["control_key"], 1.0)
    exported = stage.post("/export_trajectories", {"session_id": session_id}, stage.admin_key)
    assert len(exported.json()["interactions"]) == 1
    assert stage.post("/grant_capacity", {}, stage.admin_key).status_code == 200
    ticket = {"task_id": "try", "ref": {"ticket_id": 7, "attempt": 0}}
    assert stage.post("/rl/start_session", ticket, stage.admin_key).status_code == 403
    for route in ("offer_episode", "await_session", "finish_ticket", "keep_failed", "seal"):
        assert stage.post(f"/rl/{route}", {}, stage.admin_key).status_code == 401


def test_a_drivers_key_opens_its_own_proxy_alone(stage: Stage) -> None:
    assert stage.post("/rl/seal", {}, stage.driver_key).status_code == 200
    others = [derive_bearer_key(stage.service_key, name) for name in ("proxy-cell-1", "ledger")]
    for key in (*others, derive_bearer_key(OTHER_SERVICE_KEY, "proxy-cell-0"), "wrong"):
        refused = stage.post("/rl/seal", {}, key)
        assert refused.status_code == 401
        assert stage.driver_key not in refused.text
    assert stage.http.post(f"{stage.url}/rl/seal", json={}).status_code == 401


TASK = {"question": "What is 1 + 2?"}


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("online"), agent={"mode": "online"})
    yield stage
    stage.close()


def offer(stage: Stage, ticket_id: int, wait_s: float = 60.0) -> http.client.HTTPConnection:
    """Offer a session as a driver does, and return once the offer waits at the proxy."""
    session = StartSessionRequest("train", TicketRef(ticket_id, 0))
    return stage.begin("/rl/offer_episode", OfferEpisodeRequest(session, TASK, wait_s))


def taken_by(offered: http.client.HTTPConnection) -> str | None:
    """Return the session that plays the offer, as soon as it exists, or None without a player."""
    reply = msgspec.json.decode(offered.getresponse().read(), type=OfferEpisodeReply)
    offered.close()
    return reply.session_id


def is_answered(offered: http.client.HTTPConnection) -> bool:
    return bool(select.select([offered.sock], [], [], 0)[0])


def come(stage: Stage, **more: Any) -> httpx.Response:
    """Start a session as an outside program does with AReaL's proxy, again while it is full."""
    while True:
        answer = stage.post("/rl/start_session", {"task_id": "mine", **more})
        if answer.status_code != 429:
            return answer


def test_a_program_plays_the_oldest_ticket_and_its_session_becomes_rows(online: Stage) -> None:
    newer, older = offer(online, 12), offer(online, 11)
    opened = come(online, api_key="sk-chosen-by-the-client").json()
    assert opened["task"] == TASK
    assert opened["api_key"] == "sk-chosen-by-the-client"
    assert taken_by(older) == opened["session_id"]
    assert not is_answered(newer)
    come(online)
    assert taken_by(newer)
    question = AwaitSessionEndRequest(opened["session_id"], 0.0)
    assert online.post("/rl/await_session", question).json() == {"ended": False, "reward": None}
    assert online.ask(opened["api_key"], "hi").status_code == 200
    online.finish_session(opened["api_key"], 0.5)
    assert online.post("/rl/await_session", question).json() == {"ended": True, "reward": 0.5}
    finished = {"ref": msgspec.to_builtins(TicketRef(11, 0)), "session_ids": [opened["session_id"]]}
    assert online.post("/rl/finish_ticket", finished).json() == {"rows": 1}


def test_nobody_opens_a_session_while_no_ticket_waits(online: Stage) -> None:
    answer = online.post("/rl/start_session", {"task_id": "mine"})
    assert (answer.status_code, "repeat" in answer.text) == (429, True)


def test_an_offer_that_nobody_takes_ends(online: Stage) -> None:
    assert taken_by(offer(online, 13, wait_s=0.2)) is None
    assert online.post("/rl/start_session", {"task_id": "mine"}).status_code == 429


def test_an_offer_whose_driver_left_is_not_given_away(online: Stage) -> None:
    offer(online, 14).close()
    online.catch_up()
    assert online.post("/rl/start_session", {"task_id": "mine"}).status_code == 429


def test_other_proxies_take_no_offers(stage: Stage) -> None:
    request = OfferEpisodeRequest(StartSessionRequest("train", TicketRef(15, 0)), TASK, 0.0)
    assert stage.post("/rl/offer_episode", request).status_code == 404
    assert stage.post("/rl/await_session", AwaitSessionEndRequest("no-such")).status_code == 404
