"""Malformed input is read as its content says, or refused with the name of its field."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.proxy.talk import LEAST, QUESTION, ignored
from tests.support.chatml import write_model_dir
from tests.support.proxy_stage import Stage

CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
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
"""Wrong fields beside the minimal request, and the name in the refusal."""


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
        answer = stage.post("/v1/chat/completions", body, key)
        assert answer.status_code == 400, answer.text


def test_a_token_outside_the_vocabulary_never_reaches_the_engine(tmp_path: Path) -> None:
    stage = Stage(tmp_path, model_dir=write_model_dir(tmp_path / "model", vocab_size=300))
    _, key = stage.open_session()
    answer = stage.ask(key, "hello")  # merged tokens have the highest ids
    stage.close()
    assert answer.status_code == 400
    assert "vocabulary of 300" in answer.json()["error"]["message"]
    assert stage.sglang.requests == []


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def prompt_of_last(stage: Stage) -> str:
    return stage.prompt_of(stage.sglang.requests[-1])


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br"])
def test_an_encoded_body_is_refused_by_its_encoding(stage: Stage, key: str, encoding: str) -> None:
    body = gzip.compress(json.dumps(LEAST["/chat/completions"]).encode())
    answer = stage.post("/v1/chat/completions", body, key, {"content-encoding": encoding})
    assert answer.status_code == 415
    assert encoding in answer.json()["error"]["message"]


def test_hosted_items_are_left_out_and_counted(stage: Stage, key: str) -> None:
    kinds = ["web_search_call", "mcp_call", "mcp_list_tools", "local_shell_call", "compaction"]
    kinds += ["local_shell_call_output", "image_generation_call", "code_interpreter_call"]
    items = [{"type": kind, "id": kind, "status": "completed"} for kind in kinds]
    body = {"input": [*items, {"role": "user", "content": "Hi"}]}
    assert stage.post("/v1/responses", body, key).status_code == 200
    assert prompt_of_last(stage).startswith("<|im_start|>user\nHi<|im_end|>")
    assert {("/responses", f"input[{kind}]") for kind in kinds} <= ignored(stage).keys()
    unknown = stage.post("/v1/responses", {"input": [{"type": "mesage"}]}, key)
    assert unknown.json()["error"]["param"] == "input[0].type"


def test_turns_in_the_shape_of_chats_are_read(stage: Stage, key: str) -> None:
    items: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "RESULT"},
    ]
    body = {"input": items, "metadata": {"a": None, "b": "x"}}
    answer = stage.post("/v1/responses", body, key)
    assert (answer.status_code, answer.json().get("metadata")) == (200, {"b": "x"})
    (interaction,) = stage.journaled(key)
    chat = stage.chat(stage.open_session()[1], items)
    assert chat.status_code == 200
    first, second = stage.sglang.requests
    assert first["input_ids"] == second["input_ids"]
    assert [turn["role"] for turn in interaction.new_messages] == ["user", "assistant", "tool"]


USED: list[dict[str, Any]] = [
    {"type": "redacted_thinking", "data": "x"},
    {"type": "tool_use", "id": "c", "name": "read", "input": {}},
]
RESULT = {
    "type": "tool_result",
    "tool_use_id": "c",
    "content": [{"type": "text", "text": "a file"}, IMAGE],
}
CALLED = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
OUTPUT: list[dict[str, Any]] = [
    {"type": "input_text", "text": "a file"},
    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
]
PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "a file"},
    {"type": "image_url", "image_url": {"url": "data:,"}},
]
RESULTS_WITH_IMAGES: list[tuple[str, str, list[Any], str]] = [
    (
        "/v1/messages",
        "messages",
        [{"role": "assistant", "content": USED}, {"role": "user", "content": [RESULT]}],
        "[image left out: this model reads text]",
    ),
    (
        "/v1/responses",
        "input",
        [CALLED, {"type": "function_call_output", "call_id": "c", "output": OUTPUT}],
        "[input_image left out: this model reads text]",
    ),
    (
        "/v1/chat/completions",
        "messages",
        [
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": PARTS},
        ],
        "[image_url left out: this model reads text]",
    ),
]


@pytest.mark.parametrize(("route", "name", "history", "placeholder"), RESULTS_WITH_IMAGES)
def test_an_image_in_a_tools_result_is_named_beside_the_text(
    stage: Stage, key: str, route: str, name: str, history: list[Any], placeholder: str
) -> None:
    answer = stage.post(route, {name: [*QUESTION, *history]}, key)
    assert answer.status_code == 200, answer.text
    assert f"<|im_start|>tool\na file\n{placeholder}<|im_end|>" in prompt_of_last(stage)


HOSTED_TOOLS = {
    "/responses": [
        *["mcp", "code_interpreter", "file_search", "computer_use_preview", "local_shell"],
        *["shell", "apply_patch"],
    ],
    "/messages": ["bash_20250124", "text_editor_20250728", "memory_20250818", "computer_20250124"],
}


@pytest.mark.parametrize("route", HOSTED_TOOLS)
def test_tools_of_a_providers_own_models_are_left_out(stage: Stage, key: str, route: str) -> None:
    function = {"name": "add", "parameters": {}, "type": "function"}
    none: Any = "none"
    if route == "/messages":
        function, none = {"name": "add", "input_schema": {}}, {"type": "none"}
    tools = [function, *({"type": kind, "name": "x"} for kind in HOSTED_TOOLS[route])]
    answer = stage.post(f"/v1{route}", {**LEAST[route], "tools": tools, "tool_choice": none}, key)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-areal-dropped-tools"] == ", ".join(sorted(HOSTED_TOOLS[route]))


def test_claude_codes_placeholder_is_no_tool(stage: Stage, key: str) -> None:
    names = ("add", "DeferredToolPlaceholder")
    tools = [{"name": name, "input_schema": {}, "defer_loading": True} for name in names]
    body = {**LEAST["/messages"], "tools": tools, "tool_choice": {"type": "none"}}
    assert stage.post("/v1/messages", body, key).status_code == 200
    assert "DeferredToolPlaceholder" not in prompt_of_last(stage)


def test_users_that_follow_one_another_are_one_turn_of_messages(stage: Stage, key: str) -> None:
    body = {"messages": [{"role": "user", "content": text} for text in ("a", "b")]}
    assert stage.post("/v1/messages", body, key).status_code == 200
    assert prompt_of_last(stage).startswith("<|im_start|>user\na\nb<|im_end|>")
