"""A proxy that is asked too much says so, and when to come back."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from openai import DefaultHttpxClient

from tests.contract.proxy.talk import QUESTION
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import TALKATIVE, Script
from tests.support.waiting import wait_for


def test_calls_beyond_the_limit_are_repeated_by_the_sdk(small_stage: Stage, small_key: str) -> None:
    stage, key = small_stage, small_key
    gate = threading.Event()
    stage.sglang.script = lambda request: Script(gate=gate)
    with ThreadPoolExecutor(2) as agents:
        calls = [agents.submit(stage.ask, key, f"call {number}") for number in range(2)]
        while len(stage.sglang.requests) < 2:
            time.sleep(0.01)
        for more in ({}, {"stream": True}):
            refused = stage.ask(key, "one too many", **more)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.headers["retry-after"] == "1"

        def let_calls_end(answer: Any) -> None:
            if answer.status_code == 429:
                gate.set()

        with (
            DefaultHttpxClient(event_hooks={"response": [let_calls_end]}) as http_client,
            stage.client(key).with_options(http_client=http_client) as client,
        ):
            reply = client.chat.completions.create(model="m", messages=QUESTION)
        assert reply.choices[0].message.content == "hello world"
        assert [call.result().status_code for call in calls] == [200, 200]
    assert stage.end_session(key) == 3


def test_an_abandoned_stream_gives_its_place_back(small_stage: Stage, small_key: str) -> None:
    stage, key = small_stage, small_key
    stage.sglang.script = lambda request: TALKATIVE
    body = {"messages": QUESTION, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    for _ in range(2):
        with stage.http.stream(
            "POST", f"{stage.url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            assert answer.status_code == 200, answer.read()
            next(answer.iter_lines())
    stage.sglang.script = lambda request: Script()
    health = f"{stage.url}/healthz"  # they would speak for longer
    wait_for(lambda: not stage.http.get(health).json()["requests_in_flight"], 15)
    assert stage.ask(key, "hi").status_code == 200


def test_a_conversation_may_be_only_so_long(small_stage: Stage, small_key: str) -> None:
    messages = QUESTION * 6
    refused = small_stage.chat(small_key, messages)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages"
    assert "too many messages: 6 (limit 5)" in refused.json()["error"]["message"]
    assert small_stage.chat(small_key, messages[1:]).status_code == 200


def test_sessions_beyond_the_limit_wait_until_there_is_room(small_stage: Stage) -> None:
    def start() -> httpx.Response:
        return small_stage.post("/rl/start_session", {"task_id": "late"})

    keys = [small_stage.open_session()[1] for _ in range(3)]
    refused = start()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    small_stage.end_session(keys[2])
    assert [start().status_code for _ in range(2)] == [200, 429]
    assert small_stage.post("/grant_capacity", {}).json() == {"capacity": 4}
    assert [start().status_code for _ in range(2)] == [200, 429]
    wait_for(lambda: start().status_code == 200)
    assert small_stage.ask(keys[0], "hi").status_code == 401
    small_stage.post("/grant_capacity", {})  # for the next test
