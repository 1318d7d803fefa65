"""The least request of every dialect; what a proxy's streams and metrics say."""

import json
import re
from typing import Any

import httpx

from tests.support.proxy_stage import Stage

QUESTION: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
LEAST: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": QUESTION},
    "/completions": {"prompt": "hello"},
    "/messages": {"messages": QUESTION},
    "/responses": {"input": "hello"},
}
"""What a request must have, by its route."""


def ask_least(stage: Stage, key: str, route: str, **more: Any) -> httpx.Response:
    """The answer to the least request, with more."""
    answer = stage.post(f"/v1{route}", {**LEAST[route], **more}, key)
    assert answer.status_code == 200, (more, answer.text)
    return answer


def turn(reply: str, question: str = "and 1?") -> list[Any]:
    """What a conversation goes on with."""
    return [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The decoded chunks of a streamed (chat) completion."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    *data, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


def counted(stage: Stage, name: str) -> int:
    """A counter of the proxy's; 0 if it has none of this name and labels."""
    lines = stage.http.get(f"{stage.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return int(float(values.get(f"areal_hpc_proxy_{name}", 0)))


def ignored(stage: Stage) -> dict[tuple[str, str], int]:
    """How often each parameter was taken without effect, by route and name."""
    text = stage.http.get(f"{stage.url}/metrics").text
    pattern = r'areal_hpc_proxy_ignored_parameters_total\{parameter="(.+)",route="(.+)"\} (\d+)'
    return {(route, name): int(count) for name, route, count in re.findall(pattern, text)}


def assert_refused(answer: httpx.Response, route: str, name: str) -> str:
    """By its name; the message."""
    assert answer.status_code == 400, answer.text
    error: dict[str, str] = answer.json()["error"]
    shown, message = error.get("param"), error["message"]
    if route.startswith("/messages"):
        shown, _, message = message.partition(": ")
    assert shown == name.replace("[]", "[0]")
    return message
