"""What a route cannot honor is refused by the name of the parameter, and never reaches a model."""

from pathlib import Path
from typing import Any

import pytest

from tests.contract.proxy.talk import LEAST, QUESTION
from tests.support.chatml import write_model_dir
from tests.support.proxy_stage import Stage

CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A message of parts."""
    return [{"role": "user", "content": [*parts]}]


BEGUN = [*QUESTION, {"role": "assistant", "content": "3 +"}]
USE = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
USED_TOOL = [*QUESTION, {"role": "assistant", "content": [USE]}]
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/chat/completions": [
        ({"messages": []}, "messages"),
        ({"temperature": 1e308}, "temperature"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"tools": [CHAT_TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": user({"type": "image_url", "image_url": {}})}, "messages[0].content[0].type"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"continue_final_message": True}, "messages[0]"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"guided_json": {"type": "object"}, "regex": "a"}, "regex"),
        ({"messages": BEGUN, "continue_final_message": True, "regex": "a"}, "messages"),
        ({"functions": [{"name": "f"}], "tools": [CHAT_TOOL], "tool_choice": "none"}, "functions"),
    ],
    "/completions": [
        *(({"prompt": wrong}, "prompt") for wrong in ("", ["a", "b"], [1, "b"], [True], [2**70])),
        ({"best_of": 2}, "best_of"),
        ({"seed": 2**70}, "seed"),
    ],
    "/messages": [
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"messages": user({"type": "thinking", "thinking": ""})}, "messages[0].content[0].type"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"messages": USED_TOOL}, "messages[1]"),
    ],
    "/responses": [
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": [{"type": "item_reference", "id": "msg_00"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": user({"type": "input_image", "image_url": "x"})}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
    "/tokenize": [
        ({}, "prompt"),
        ({"prompt": "a", "messages": QUESTION}, "prompt"),
        ({"messages": QUESTION, "add_special_tokens": True}, "add_special_tokens"),
    ],
    "/detokenize": [({"tokens": [512]}, "tokens")],
}
"""What is wrong, beside the least that a request has, and the name by which it is refused."""


@pytest.mark.parametrize("route", REFUSED)
def test_what_cannot_be_honored_is_refused_by_name(stage: Stage, key: str, route: str) -> None:
    for wrong, param in REFUSED[route]:
        answer = stage.post(f"/v1{route}", {**LEAST.get(route, {}), **wrong}, key)
        assert answer.status_code == 400, (wrong, answer.text)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        if route == "/messages":
            assert error["message"].startswith(f"{param}: ")
            assert answer.json()["type"] == "error"
        else:
            assert error["param"] == param
    assert stage.sglang.requests == []


def test_a_body_that_is_not_json_is_the_requests_fault(stage: Stage, key: str) -> None:
    tool = b'{"type": "function", "function": {"name": "add", "parameter\xa0": {}}}'
    in_a_tool = b'{"messages": [{"role": "user", "content": "hi"}], "tools": [%b]}' % tool
    for body in (b"{", b"\xff\xfe", b"", in_a_tool):
        answer = stage.http.post(
            f"{stage.url}/v1/chat/completions", content=body, headers={"x-api-key": key}
        )
        assert answer.status_code == 400, answer.text


def test_a_token_outside_the_vocabulary_never_reaches_the_engine(tmp_path: Path) -> None:
    stage = Stage(tmp_path, model_dir=write_model_dir(tmp_path / "model", vocab_size=300))
    _, key = stage.open_session()
    answer = stage.ask(key, "hello")  # merged tokens have the highest ids
    stage.close()
    assert answer.status_code == 400
    assert "vocabulary of 300" in answer.json()["error"]["message"]
    assert stage.sglang.requests == []
