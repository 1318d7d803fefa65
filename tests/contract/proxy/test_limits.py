"""A proxy that is asked too much says so, and when to come back."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import DefaultHttpxClient
from openai.types.chat import ChatCompletionMessageParam

from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import TALKATIVE, Script
from tests.support.waiting import wait_for

LIMITS = {"max_concurrent_calls": 2, "max_messages": 5, "max_sessions": 3, "session_timeout_s": 4.0}
"""A session outlives the second that the SDK waits before it repeats a call."""


@pytest.fixture(scope="module")
def small_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"), proxy=LIMITS)
    yield stage
    stage.close()


def test_more_calls_than_may_be_are_sent_back_and_the_sdk_repeats_them(small_stage: Stage) -> None:
    stage = small_stage
    _, key = stage.open_session()
    stage.sglang.requests.clear()
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
            messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "patient"}]
            reply = client.chat.completions.create(model="m", messages=messages)
        assert reply.choices[0].message.content == "hello world"
        assert [call.result().status_code for call in calls] == [200, 200]
    assert stage.post("/rl/end_session", {}, key).json()["interaction_count"] == 3


def test_a_stream_that_its_client_left_gives_its_place_back(small_stage: Stage) -> None:
    stage = small_stage
    _, key = stage.open_session()
    stage.sglang.script = lambda request: TALKATIVE
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
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
    stage.post("/rl/end_session", {}, key)


def test_a_conversation_may_be_only_so_long(small_stage: Stage) -> None:
    _, key = small_stage.open_session()
    messages = [{"role": "user", "content": "hi"}] * 6
    refused = small_stage.chat(key, messages)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages"
    assert "too many messages: 6 (limit 5)" in refused.json()["error"]["message"]
    assert small_stage.chat(key, messages[1:]).status_code == 200
    small_stage.post("/rl/end_session", {}, key)


def test_sessions_beyond_the_limit_wait_until_idle_ones_expire(small_stage: Stage) -> None:
    keys = [small_stage.open_session()[1] for _ in range(3)]
    request = {"task_id": "late"}
    refused = small_stage.post("/rl/start_session", request)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    wait_for(lambda: small_stage.post("/rl/start_session", request).status_code == 200)
    assert small_stage.ask(keys[0], "hi").status_code == 401
