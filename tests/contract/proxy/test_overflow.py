"""A prompt too long for the model, in the words and codes by which clients know it."""

from typing import Any

import pytest

from tests.support.proxy_stage import Stage

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
    """How long a prompt is, as the proxy counts."""
    asked = {"prompt": body["prompt"], "add_special_tokens": True} if "prompt" in body else None
    counted = stage.post("/tokenize", asked or {"messages": MESSAGES}, key).json()["count"]
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
