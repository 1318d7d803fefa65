"""Minimal request of every dialect, calls of clients, and readers of streams and metrics."""

import json
import re
from typing import Any

import httpx

from areal_hpc.session.tree import Interaction, unpack_ids
from tests.support.proxy_stage import Stage

QUESTION: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
LEAST: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": QUESTION},
    "/completions": {"prompt": "hello"},
    "/messages": {"messages": QUESTION},
    "/responses": {"input": "hello"},
}
"""Minimal request, by its route."""


def ask_least(stage: Stage, key: str, route: str, **more: Any) -> httpx.Response:
    answer = stage.post(f"/v1{route}", {**LEAST[route], **more}, key)
    assert answer.status_code == 200, (more, answer.text)
    return answer


def turn(reply: str, question: str = "and 1?") -> list[Any]:
    return [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Decode the chunks of a streamed (chat) completion."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    *data, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


def counted(stage: Stage, name: str) -> int:
    """Return a counter of the proxy's, or 0 without one of this name and labels."""
    lines = stage.http.get(f"{stage.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return int(float(values.get(f"areal_hpc_proxy_{name}", 0)))


def ignored(stage: Stage) -> dict[tuple[str, str], int]:
    """Count each parameter that was accepted without effect, by route and name."""
    text = stage.http.get(f"{stage.url}/metrics").text
    pattern = r'areal_hpc_proxy_ignored_parameters_total\{parameter="(.+)",route="(.+)"\} (\d+)'
    return {(route, name): int(count) for name, route, count in re.findall(pattern, text)}


def assert_refused(answer: httpx.Response, route: str, name: str) -> str:
    """Assert a refusal that names the parameter, and return its message."""
    assert answer.status_code == 400, answer.text
    error: dict[str, str] = answer.json()["error"]
    shown, message = error.get("param"), error["message"]
    if route.startswith("/messages"):
        shown, _, message = message.partition(": ")
    assert shown == name.replace("[]", "[0]")
    return message


def generate_reply(stage: Stage, key: str, like: Interaction, **sampling: Any) -> None:
    assert like.parent_id is None
    body = {"input_ids": unpack_ids(like.new_ids).tolist(), "sampling_params": sampling}
    assert stage.post("/generate", body, key).status_code == 200


def change_call(call: Interaction, **fields: Any) -> dict[str, Any]:
    """The call as a client that records its own calls would send it, with some fields replaced."""
    sent = {name: getattr(call, name) for name in call.__struct_fields__}
    return sent | {"interaction_id": "made-up"} | fields
