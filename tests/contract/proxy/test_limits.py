"""An overloaded proxy refuses calls, long prompts and costly bodies with an error."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import DefaultHttpxClient

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.parameters import MAX_REWRITTEN_OBJECTS, MAX_UNKNOWN_PARAMS
from areal_hpc.proxy.dialects.validation import (
    MAX_OBJECTS,
    MAX_TOOLS,
    MAX_UNCOUNTED_BODY_BYTES,
    refuse_too_many_values,
)
from areal_hpc.proxy.metrics import MAX_NAME_CHARS
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
    for _ in range(2):
        with stage.stream("/v1/chat/completions", {"messages": QUESTION}, key) as answer:
            assert answer.status_code == 200, answer.read()
            next(answer.iter_lines())
    stage.sglang.script = lambda request: Script()
    health = f"{stage.url}/healthz"  # they would run longer
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


LONG = "x y " * 2000
MESSAGES: list[Any] = [{"role": "user", "content": LONG}]
CONTEXT_TOKENS = 2048
OPENAI = (
    '{{"error":{{"message":"This model\'s maximum context length is 2048 tokens. However, your '
    "messages resulted in {tokens} tokens. Please reduce the length of the messages "
    '(context_length_exceeded).","type":"invalid_request_error","param":"{param}","code":"context_length_exceeded"}}}}'
)
ANTHROPIC = (
    '{{"type":"error","error":{{"type":"invalid_request_error",'
    '"message":"prompt is too long: {tokens} tokens > 2048 maximum"}}}}'
)


def tokens_of(stage: Stage, key: str, body: dict[str, Any]) -> int:
    """Return the length of a prompt as the proxy counts it."""
    plain = {"prompt": body["prompt"], "add_special_tokens": True} if "prompt" in body else None
    counted = stage.post("/tokenize", plain or {"messages": MESSAGES}, key).json()["count"]
    assert counted > CONTEXT_TOKENS
    return int(counted)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "expected", "param"),
    [
        ("/chat/completions", {"messages": MESSAGES}, OPENAI, "messages"),
        ("/completions", {"prompt": LONG}, OPENAI, "prompt"),
        ("/responses", {"input": LONG}, OPENAI, "input"),
        ("/messages", {"messages": MESSAGES}, ANTHROPIC, ""),
    ],
)
def test_an_overflow_is_told_to_the_byte(
    stage: Stage,
    key: str,
    route: str,
    body: dict[str, Any],
    expected: str,
    param: str,
    streams: bool,
) -> None:
    tokens = tokens_of(stage, key, body)
    answer = stage.post(f"/v1{route}", {**body, "stream": streams}, key)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert answer.text == expected.format(tokens=tokens, param=param)
    assert stage.sglang.requests == []


def test_a_prompt_without_room_for_a_reply_is_too_long(stage: Stage, key: str) -> None:

    def ask(words: int) -> Any:
        body = {"messages": [{"role": "user", "content": "x" * words}]}
        return stage.post("/v1/messages", body, key)

    base = CONTEXT_TOKENS - ask(1).json()["usage"]["input_tokens"] + 1
    assert ask(base - 1).status_code == 200
    message = ask(base).json()["error"]["message"]
    assert message == "prompt is too long: 2048 tokens > 2047 maximum"


FUNCTION = {"type": "function", "function": {"name": "f"}}


def test_values_are_counted_before_they_are_read() -> None:
    body = b'{"messages":[' + b"[]," * MAX_OBJECTS + b"[]]}"
    assert len(body) > MAX_UNCOUNTED_BODY_BYTES
    with pytest.raises(ProxyRequestError, match="too many members, objects and lists"):
        asyncio.run(refuse_too_many_values(body, 1))
    text = rb'{"messages":"\"' + b"{[:" * MAX_OBJECTS + b'"}'  # it has none
    asyncio.run(refuse_too_many_values(text, 1))


def test_what_nests_too_deep_is_refused(stage: Stage, key: str) -> None:
    answer = stage.post("/v1/chat/completions", b'{"messages":' + b"[" * 90_000, key)
    assert answer.status_code == 400
    assert "recursion" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({f"hint{i}": 1 for i in range(MAX_UNKNOWN_PARAMS + 1)}, "parameters are not supported"),
        ({"messages": [{}] * (MAX_REWRITTEN_OBJECTS + 1)}, "objects are not as this API has them"),
        (
            {"messages": [1] * (2 * MAX_REWRITTEN_OBJECTS + 1)},
            "objects are not as this API has them",
        ),
        ({"tools": [FUNCTION] * (MAX_TOOLS + 1)}, "too many tools"),
    ],
    ids=["unknown parameters", "objects", "what is no object", "tools"],
)
def test_slow_parts_are_counted(stage: Stage, key: str, more: dict[str, Any], problem: str) -> None:
    answer = stage.post("/v1/chat/completions", {"messages": QUESTION, **more}, key)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_a_long_name_is_cut_before_it_is_recorded(stage: Stage, key: str) -> None:
    answer = stage.ask(key, "hi", **{"n" * 90_000: 1})
    assert answer.status_code == 200, answer.text
    (interaction,) = stage.await_journaled(key)
    assert interaction.ignored == ["n" * MAX_NAME_CHARS]


def test_a_refusal_quotes_little_of_the_request(stage: Stage, key: str) -> None:
    choice = {"type": "function", "function": {"name": "f" * 60_000}}
    answer = stage.ask(key, "hi", tools=[FUNCTION], tool_choice=choice)
    assert answer.status_code == 400
    assert "there is no tool" in answer.json()["error"]["message"]
    assert len(answer.content) < 10_000


def test_halves_of_pairs_are_replaced_and_nothing_else(stage: Stage, key: str) -> None:
    body = b"\xef\xbb\xbf" + rb'{"messages":[{"role":"user","content":"%s"}]}'
    text = rb"a\ud83d\ude00b\ud83dc\ude00d\\ud83de\\\ud83df"
    answer = stage.post("/v1/chat/completions", body % text, key)
    assert answer.status_code == 200, answer.text
    (request,) = stage.sglang.requests
    assert "a\U0001f600b\ufffdc\ufffdd\\ud83de\\\ufffdf" in stage.prompt_of(request)
