"""Tool calls and reasoning: SGLang's own parsers, in a process of their own, behind the proxy."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from areal_hpc.jobs.environment import get_interpreter
from areal_hpc.wire.ledger import TicketRef
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

ADD: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x", "y"],
        },
    },
}
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 3 + 4?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3, "y": 4}}\n</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"x": 3\n</tool_call>'


def says(stage: Stage, text: str, piece_tokens: int = 1) -> str:
    """Let the model say `text`; the key of a new session."""
    stage.sglang.requests.clear()
    stage.sglang.script = lambda request: Script(text, piece_tokens=piece_tokens)
    stage.sglang.incremental = True
    return stage.open_session(TicketRef(1, 0))[1]


def streamed(stage: Stage, key: str, **request: Any) -> dict[str, Any]:
    """A streamed reply put together as the SDK's own helper does it."""
    with (
        stage.client(key) as client,
        client.chat.completions.stream(model="m", messages=QUESTION, **request) as events,
    ):
        message = events.get_final_completion().choices[0].message
    return message.model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("said", "content", "reasoning", "calls"),
    [
        ("just text", "just text", None, 0),
        (CALL, None, None, 1),
        ("I add. " + CALL, "I add.", None, 1),
        (CALL + "\n" + CALL, None, None, 2),
        (f"<think>\nadd them\n</think>\n\n{CALL}", None, "add them", 1),
        ("<think>\nhard\n</think>\n\n7", "7", "hard", 0),
        (BROKEN, BROKEN, None, 0),
        (UNKNOWN, UNKNOWN, None, 0),
        (f"{CALL}\n{UNKNOWN}", UNKNOWN, None, 1),
    ],
)
@pytest.mark.parametrize("piece_tokens", [0, 1, 5])
def test_replies_are_taken_apart_and_nothing_of_them_is_lost(
    parsing_stage: Stage,
    said: str,
    content: str | None,
    reasoning: str | None,
    calls: int,
    piece_tokens: int,
) -> None:
    stage = parsing_stage
    key = says(stage, said, piece_tokens or 1)
    if piece_tokens:
        message = streamed(stage, key, tools=[ADD])
    else:
        answer = stage.chat(key, QUESTION, tools=[ADD])
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert (message.get("content") or "").strip() == (content or "")
    assert message.get("reasoning_content") == reasoning
    found = message.get("tool_calls") or []
    assert [json.loads(call["function"]["arguments"]) for call in found] == [
        {"x": 3, "y": 4}
    ] * calls
    assert len({call["id"] for call in found}) == calls
    (interaction,) = stage.journaled(key)
    raw = stage.tokenizer.decode([int(i) for i in memoryview(interaction.output_ids).cast("i")])
    assert raw.startswith(said)


def test_a_conversation_with_tool_calls_and_reasoning_keeps_the_models_tokens(
    parsing_stage: Stage,
) -> None:
    stage = parsing_stage
    key = says(stage, f"<think>\nadd them\n</think>\n\n{CALL}")
    first = stage.chat(key, QUESTION, tools=[ADD]).json()["choices"][0]["message"]
    (call,) = first["tool_calls"]
    # As SDKs give it back: other spacing, no nulls, no reasoning.
    arguments = json.dumps({"y": 4, "x": 3}, indent=1)
    call = {**call, "function": {"name": "add", "arguments": arguments}}
    history: list[Mapping[str, object]] = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "7"},
    ]
    assert stage.chat(key, history, tools=[ADD]).status_code == 200
    before, after = (request["input_ids"] for request in stage.sglang.requests)
    own = stage.tokenizer.encode(f"<think>\nadd them\n</think>\n\n{CALL}<|im_end|>").ids
    assert after[: len(before) + len(own)] == before + own
    assert stage.tokenizer.decode(after[len(before) + len(own) :], skip_special_tokens=False) == (
        "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("asked", "tag"),
    [
        ({"tool_choice": "required"}, {"at_least_one": True}),
        (
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
            {"at_least_one": True},
        ),
        ({"parallel_tool_calls": False}, {"at_least_one": False, "stop_after_first": True}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"at_least_one": True, "stop_after_first": True},
        ),
    ],
)
def test_what_is_asked_of_tool_calls_becomes_a_grammar(
    parsing_stage: Stage, asked: dict[str, Any], tag: dict[str, Any]
) -> None:
    key = says(parsing_stage, CALL)
    answer = parsing_stage.chat(key, QUESTION, tools=[ADD], **asked)
    assert answer.status_code == 200, answer.text
    params = parsing_stage.sglang.requests[0]["sampling_params"]
    grammar = json.loads(params["structural_tag"])
    grammar = grammar.get("format", grammar)
    assert {name: grammar[name] for name in tag} == tag
    assert params["skip_special_tokens"] is False


def test_the_format_of_the_text_does_not_bind_a_call_that_must_be_made(
    parsing_stage: Stage,
) -> None:
    key = says(parsing_stage, CALL)
    asked = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    answer = parsing_stage.chat(key, QUESTION, tools=[ADD], **asked)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1
    params = parsing_stage.sglang.requests[0]["sampling_params"]
    assert "json_schema" not in params
    assert "structural_tag" in params


def test_a_stream_has_one_call_a_chunk(parsing_stage: Stage) -> None:
    key = says(parsing_stage, f"I add. {CALL}\n{CALL}")
    with parsing_stage.client(key) as client:
        asked: Any = {"model": "m", "messages": QUESTION, "tools": [ADD], "stream": True}
        chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked)]
    calling = [delta.tool_calls for delta in chunks if delta.tool_calls]
    assert [len(calls) for calls in calling] == [1, 1]
    (first,), (second,) = calling
    assert (first.index, second.index) == (0, 1)
    assert first.id
    assert second.id not in (first.id, None)
    for call in (first, second):
        assert call.function is not None
        assert (call.function.name, call.type) == ("add", "function")
        assert json.loads(call.function.arguments or "") == {"x": 3, "y": 4}
    assert "".join(delta.content or "" for delta in chunks).strip() == "I add."


def test_tools_that_may_not_be_called_are_neither_shown_nor_looked_for(
    parsing_stage: Stage,
) -> None:
    key = says(parsing_stage, CALL)
    message = parsing_stage.chat(key, QUESTION, tools=[ADD], tool_choice="none").json()
    assert message["choices"][0]["message"]["content"] == CALL
    prompt = parsing_stage.tokenizer.decode(parsing_stage.sglang.requests[0]["input_ids"])
    assert "add" not in prompt


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "required", "regex": "a+"}, "regex"),
    ],
)
def test_what_cannot_hold_together_is_refused(
    parsing_stage: Stage, asked: dict[str, Any], param: str
) -> None:
    key = says(parsing_stage, CALL)
    answer = parsing_stage.chat(key, QUESTION, tools=[ADD], **asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_parsers_that_die_are_started_again(parsing_stage: Stage) -> None:
    assert parsing_stage._process is not None
    proxy_pid = parsing_stage._process.pid
    key = says(parsing_stage, CALL)
    assert parsing_stage.chat(key, QUESTION, tools=[ADD]).status_code == 200
    threads = Path(f"/proc/{proxy_pid}/task").glob("*/children")
    (parsers,) = {int(pid) for path in threads for pid in path.read_text().split()}
    os.kill(parsers, signal.SIGKILL)
    parsing_stage.http.timeout = 120.0  # they import SGLang again
    message = parsing_stage.chat(key, QUESTION, tools=[ADD]).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def test_the_real_engine_calls_the_tool_it_must(
    stage: Stage, model_dir: Any, sglang_url: str, tmp_path: Any
) -> None:
    real = Stage(tmp_path, model_dir=model_dir, context_tokens=1024)
    real.stop_proxy()
    formats = {"tool_call_parser": "qwen25", "serve_python": get_interpreter("serve", "auto")}
    real.configure({**real.config, **formats})
    real.start_proxy()
    real.route_to(sglang_url)
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    _, key = real.open_session()
    for asked in ({}, {"parallel_tool_calls": False}):
        answer = real.chat(
            key, QUESTION, tools=[strict], tool_choice="required", max_tokens=200,
            logit_bias={"2": -5}, **asked,
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert message.get("tool_calls"), message
        assert message["tool_calls"][0]["function"]["name"] == "add"
    real.close()
