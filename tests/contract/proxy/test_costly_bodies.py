"""What a body would cost is counted before it is read; its names are cut before they are kept."""

import asyncio
from typing import Any

import pytest

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

FUNCTION = {"type": "function", "function": {"name": "f"}}


def test_values_are_counted_before_they_are_read() -> None:
    body = b'{"messages":[' + b"[]," * MAX_OBJECTS + b"[]]}"
    assert len(body) > MAX_UNCOUNTED_BODY_BYTES
    with pytest.raises(ProxyRequestError, match="too many members, objects and lists"):
        asyncio.run(refuse_too_many_values(body, 1))
    text = rb'{"messages":"\"' + b"{[:" * MAX_OBJECTS + b'"}'  # it holds none
    asyncio.run(refuse_too_many_values(text, 1))


def test_what_nests_too_deep_is_refused(stage: Stage, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    body = b'{"messages":' + b"[" * 90_000
    url = f"{stage.url}/v1/chat/completions"
    answer = stage.http.post(url, content=body, headers=headers)
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
def test_what_is_slow_to_look_at_is_counted(
    stage: Stage, key: str, more: dict[str, Any], problem: str
) -> None:
    answer = stage.post("/v1/chat/completions", {"messages": QUESTION, **more}, key)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_a_long_name_is_cut_before_it_is_recorded(stage: Stage, key: str) -> None:
    answer = stage.ask(key, "hi", **{"n" * 90_000: 1})
    assert answer.status_code == 200, answer.text
    (said,) = stage.await_journaled(key)
    assert said.ignored == ["n" * MAX_NAME_CHARS]


def test_a_refusal_quotes_little_of_the_request(stage: Stage, key: str) -> None:
    choice = {"type": "function", "function": {"name": "f" * 60_000}}
    answer = stage.ask(key, "hi", tools=[FUNCTION], tool_choice=choice)
    assert answer.status_code == 400
    assert "there is no tool" in answer.json()["error"]["message"]
    assert len(answer.content) < 10_000


def test_halves_of_pairs_are_replaced_and_what_looks_like_them_is_not(
    stage: Stage, key: str
) -> None:
    body = b"\xef\xbb\xbf" + rb'{"messages":[{"role":"user","content":"%s"}]}'
    text = rb"a\ud83d\ude00b\ud83dc\ude00d\\ud83de\\\ud83df"
    headers = {"authorization": f"Bearer {key}"}
    url = f"{stage.url}/v1/chat/completions"
    answer = stage.http.post(url, content=body % text, headers=headers)
    assert answer.status_code == 200, answer.text
    (asked,) = stage.sglang.requests
    assert "a\U0001f600b\ufffdc\ufffdd\\ud83de\\\ufffdf" in stage.prompt_of(asked)
