"""Programs outside a run open sessions, reward, end and export them, as with AReaL's proxy."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from areal_hpc.proxy.http.driver_api import MAX_KEPT_EXPORTED_SESSIONS
from areal_hpc.wire.service_key import derive_bearer_key
from tests.contract.proxy.talk import QUESTION, turn
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.service_keys import OTHER_SERVICE_KEY

KEY = "sk-chosen-by-the-client"


def start(stage: Stage, **more: Any) -> httpx.Response:
    return stage.post("/rl/start_session", {"task_id": "outside", **more})


def two_turns(stage: Stage, key: str) -> tuple[str, str]:
    """Ids of the interactions."""
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
    assert {name: one["reward"] for name, one in interactions.items()} == {first: 0.5, second: 1.0}
    for name, one in interactions.items():
        assert one["interaction_id"] == name
        row = {key: np.array(value) for key, value in one["tensor_dict"].items()}
        per_token = {"input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "attention_mask"}
        assert row.keys() == {*per_token, "rewards"}
        assert {row[name].shape for name in per_token} == {row["input_ids"].shape}
        assert row["loss_mask"].sum() == 5
        assert row["rewards"].tolist() == [one["reward"]]
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
    assert [export(stage, one).status_code for one in (oldest, next_one)] == [404, 200]
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
    (one,) = export(stage, session_id).json()["interactions"].values()
    assert (one["reward"], one["tensor_dict"]["rewards"]) == (None, [0.0])


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
