"""Requests of Google's dialect by raw HTTP, as its SDKs send them."""

import json
from typing import Any

import httpx

from tests.support.proxy_stage import Stage

CONTENTS: list[Any] = [{"role": "user", "parts": [{"text": "What is 3 + 4?"}]}]
GENERATE, STREAM, COUNT = "generateContent", "streamGenerateContent", "countTokens"
SSE = f"{STREAM}?alt=sse"
VERBS = (GENERATE, STREAM, SSE)


def ask(
    stage: Stage, key: str, verb: str = GENERATE, contents: Any = CONTENTS, **more: Any
) -> httpx.Response:
    """Send a request as SDKs of version 1 do."""
    return stage.http.post(
        f"{stage.url}/v1beta/models/tiny:{verb}",
        json={"contents": contents, **more},
        headers={"x-goog-api-key": key},
    )


def ask_well(
    stage: Stage, key: str, verb: str = GENERATE, contents: Any = CONTENTS, **more: Any
) -> list[dict[str, Any]]:
    """Send a request that must succeed and return its responses, one if it is not streamed."""
    answer = ask(stage, key, verb, contents, **more)
    assert answer.status_code == 200, answer.text
    return responses_of(answer)


def responses_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the responses of a body in either form."""
    if answer.headers["content-type"] == "text/event-stream":
        *events, rest = answer.text.split("\r\n\r\n")
        assert rest == ""
        return [json.loads(event.removeprefix("data: ")) for event in events]
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    return body if isinstance(body, list) else [body]


def parts_of(responses: list[dict[str, Any]], choice: int = 0) -> list[dict[str, Any]]:
    return [
        part
        for response in responses
        for candidate in response["candidates"]
        if candidate["index"] == choice
        for part in candidate["content"]["parts"]
    ]


def text_of(responses: list[dict[str, Any]], choice: int = 0) -> str:
    return "".join(part.get("text", "") for part in parts_of(responses, choice))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": [*parts]}
