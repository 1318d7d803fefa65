"""What a route cannot honor is refused by the name of the parameter, and never reaches a model."""

from pathlib import Path
from typing import Any

import pytest

from tests.contract.proxy.talk import LEAST, QUESTION
from tests.support.chatml import write_model_dir
from tests.support.proxy_stage import Stage

CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
LONG = "x y " * 2000


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A message of parts."""
    return [{"role": "user", "content": [*parts]}]


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/chat/completions": [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"functions": []}, "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [CHAT_TOOL]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"messages": user({"type": "image_url", "image_url": {}})}, "messages[0].content[0].type"),
    ],
    "/completions": [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": LONG}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"stream_options": {}}, "stream_options"),
        ({"messages": []}, "messages"),
    ],
    "/messages": [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "3 +"}]}, "messages[1]"),
        ({"messages": user({"type": "image", "source": {}})}, "messages[0].content[0].type"),
        ({"messages": user({"type": "thinking", "thinking": ""})}, "messages[0].content[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": "many"}, "top_k"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"tool_choice": {"type": "often"}}, "tool_choice.type"),
        ({"mcp_servers": [{"type": "url", "name": "m", "url": "http://m"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
    "/responses": [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": user({"type": "input_image", "image_url": "x"})}, "input[0].content[0].type"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": LONG}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [ADD]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
    ],
    "/tokenize": [
        ({}, "prompt"),
        ({"prompt": "a", "messages": QUESTION}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "tools": [{}]}, "tools"),
        ({"messages": QUESTION, "add_special_tokens": True}, "add_special_tokens"),
    ],
    "/detokenize": [({"tokens": [512]}, "tokens"), ({"tokens": "5"}, "tokens")],
}
"""What is wrong, beside the least that a request has, and the name by which it is refused."""


@pytest.mark.parametrize(
    ("route", "wrong", "param"),
    [(route, *case) for route, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_honored_is_refused_by_name(
    stage: Stage, route: str, wrong: dict[str, Any], param: str
) -> None:
    _, key = stage.open_session()
    answer = stage.post(f"/v1{route}", {**LEAST.get(route, {}), **wrong}, key)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if route == "/messages":
        assert error["message"].startswith(f"{param}: ")
        assert answer.json()["type"] == "error"
    else:
        assert error["param"] == param
    assert stage.sglang.requests == []


def test_a_fault_in_a_later_message_is_named_by_its_place_in_the_whole(stage: Stage) -> None:
    _, key = stage.open_session()
    history = [{"role": "user", "content": "hi"}]
    assert stage.chat(key, history).status_code == 200
    reply = {"role": "assistant", "content": "hello world"}
    answer = stage.chat(key, [*history, reply, *user({"type": "image_url"})])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[2].content[0].type"
    assert stage.chat(key, [*history, reply, *history]).status_code == 200
    first, second = stage.sglang.requests
    assert second["input_ids"][: len(first["input_ids"])] == first["input_ids"]


def test_a_body_that_is_not_json_is_the_requests_fault(stage: Stage) -> None:
    _, key = stage.open_session()
    for body in (b"{", b"\xff\xfe", b""):
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
