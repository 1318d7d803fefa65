"""Tool calls and reasoning of every dialect are read by SGLang's own parsers in a process."""

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.jobs.config import get_interpreter
from areal_hpc.wire.ledger import TicketRef
from tests.integration.proxy.tool_questions import (
    BROKEN,
    CALL,
    CHAT_TOOL,
    NO_OBJECT,
    QUESTION,
    THOUGHT,
    UNKNOWN,
    assert_spliced,
    says,
)
from tests.support.chatml import REASONING_CHATML, write_model_dir
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script


def let_say(stage: Stage, script: Script) -> None:
    stage.sglang.script = lambda request: script


def streamed(stage: Stage, key: str, **request: Any) -> dict[str, Any]:
    """Assemble a streamed reply as the SDK's own helper does."""
    with (
        stage.client(key) as client,
        client.chat.completions.stream(model="m", messages=QUESTION, **request) as events,
    ):
        message = events.get_final_completion().choices[0].message
    return message.model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("just text", "just text", None, 0),
        (CALL, None, None, 1),
        ("I add. " + CALL, "I add.", None, 1),
        (CALL + "\n" + CALL, None, None, 2),
        (THOUGHT + CALL, None, "add them", 1),
        ("<think>\nhard\n</think>\n\n7", "7", "hard", 0),
        (BROKEN, BROKEN, None, 0),
        (UNKNOWN, UNKNOWN, None, 0),
        (f"{CALL}\n{UNKNOWN}", UNKNOWN, None, 1),
        (f"{THOUGHT}Five: {NO_OBJECT}", f"Five: {NO_OBJECT}", "add them", 0),
    ],
)
@pytest.mark.parametrize("piece_tokens", [0, 1, 5])
def test_replies_are_taken_apart_and_nothing_of_them_is_lost(
    stage: Stage,
    text: str,
    content: str | None,
    reasoning: str | None,
    calls: int,
    piece_tokens: int,
) -> None:
    key = says(stage, text, piece_tokens or 1)
    if piece_tokens:
        message = streamed(stage, key, tools=[CHAT_TOOL])
    else:
        answer = stage.chat(key, QUESTION, tools=[CHAT_TOOL])
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert (message.get("content") or "").strip() == (content or "")
    assert message.get("reasoning_content") == reasoning
    tool_calls = message.get("tool_calls") or []
    arguments = [json.loads(call["function"]["arguments"]) for call in tool_calls]
    assert arguments == [{"x": 3, "y": 4}] * calls
    assert len({call["id"] for call in tool_calls}) == calls
    (interaction,) = stage.journaled(key)
    raw = stage.tokenizer.decode([int(i) for i in memoryview(interaction.output_ids).cast("i")])
    assert raw.startswith(text)


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_in_a_call_stays_as_the_model_wrote_it(
    stage: Stage, stream: bool
) -> None:
    half = CALL.replace("4", '"\\ud83d!"')
    key = says(stage, half, piece_tokens=5)
    answer = stage.chat(key, QUESTION, tools=[CHAT_TOOL], stream=stream)
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text
    (interaction,) = stage.journaled(key)
    (call,) = interaction.reply["tool_calls"]
    assert call["function"]["arguments"] == '{"x": 3, "y": "\\ud83d!"}'


def test_a_conversation_with_tool_calls_and_reasoning_keeps_the_models_tokens(stage: Stage) -> None:
    key = says(stage, THOUGHT + CALL)
    first = stage.chat(key, QUESTION, tools=[CHAT_TOOL]).json()["choices"][0]["message"]
    (call,) = first["tool_calls"]
    # SDKs give it back with other spacing, no nulls, no reasoning.
    arguments = json.dumps({"y": 4, "x": 3}, indent=1)
    call = {**call, "function": {"name": "add", "arguments": arguments}}
    history: list[Mapping[str, object]] = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "7"},
    ]
    assert stage.chat(key, history, tools=[CHAT_TOOL]).status_code == 200
    assert_spliced(stage, THOUGHT + CALL)


def test_a_stream_has_one_call_a_chunk(stage: Stage) -> None:
    key = says(stage, f"I add. {CALL}\n{CALL}")
    with stage.client(key) as client:
        options: Any = {"model": "m", "messages": QUESTION, "tools": [CHAT_TOOL], "stream": True}
        chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options)]
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


GOOGLE_TOOL = {"name": "add", "parametersJsonSchema": {"type": "object"}}
FORBIDDING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": QUESTION, "tools": [CHAT_TOOL]}, {"tool_choice": "none"}),
    (
        "/v1/messages",
        {"messages": QUESTION, "tools": [{"name": "add", "input_schema": {"type": "object"}}]},
        {"tool_choice": {"type": "none"}},
    ),
    (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", "name": "add", "parameters": {}}]},
        {"tool_choice": "none"},
    ),
    (
        "/v1beta/models/tiny:generateContent",
        {
            "contents": {"parts": [{"text": "Hi"}]},
            "tools": [{"functionDeclarations": [GOOGLE_TOOL]}],
        },
        {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
    ),
]


@pytest.mark.parametrize(("route", "body", "forbidding"), FORBIDDING)
def test_tools_that_may_not_be_called_are_shown_and_not_looked_for(
    stage: Stage, route: str, body: dict[str, Any], forbidding: dict[str, Any]
) -> None:
    key = says(stage, CALL)
    headers = {"x-goog-api-key" if "models" in route else "x-api-key": key}
    free: dict[str, Any] = {}
    for more in (free, forbidding):
        answer = stage.http.post(f"{stage.url}{route}", json=body | more, headers=headers)
        assert answer.status_code == 200, answer.text
    called, silent = stage.journaled(key)
    assert called.reply["tool_calls"]
    assert (silent.reply["content"], "tool_calls" in silent.reply) == (CALL, False)
    prompts = [request["input_ids"] for request in stage.sglang.requests[-2:]]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_the_prompt_has_all_tools_whichever_are_allowed(
    stage: Stage, route: str, mode: str
) -> None:
    key = says(stage, CALL)
    functions = [CHAT_TOOL["function"], {"name": "sub", "parameters": {"type": "object"}}]
    if route == "/v1/responses":
        body: dict[str, Any] = {
            "input": "Hi",
            "tools": [{"type": "function"} | function for function in functions],
        }
        allowed: list[Any] = [{"type": "function", "name": "sub"}, {"type": "mcp"}]
        choice: dict[str, Any] = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    else:
        tools = [{"type": "function", "function": function} for function in functions]
        body = {"messages": QUESTION, "tools": tools}
        allowed = [{"type": "function", "function": {"name": "sub"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    for more in ({}, {"tool_choice": choice}):
        answer = stage.post(route, body | more, key)
        assert answer.status_code == 200, answer.text
    free, bound = stage.sglang.requests[-2:]
    assert free["input_ids"] == bound["input_ids"]
    assert [len(entry.reply.get("tool_calls", [])) for entry in stage.journaled(key)] == [1, 0]
    grammar = bound["sampling_params"].get("structural_tag") or ""
    assert ("sub" in grammar, "add" in grammar) == (mode == "required", False)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "required", "regex": "a+"}, "regex"),
    ],
)
def test_contradictions_are_refused(stage: Stage, asked: dict[str, Any], param: str) -> None:
    key = says(stage, CALL)
    answer = stage.chat(key, QUESTION, tools=[CHAT_TOOL], **asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def find_parsers(stage: Stage) -> int:
    threads = Path(f"/proc/{stage.pid}/task").glob("*/children")
    (parsers,) = {int(pid) for path in threads for pid in path.read_text().split()}
    return parsers


def test_a_stream_in_whose_middle_the_parsers_died_fails_and_is_no_garbled_text(
    stage: Stage,
) -> None:
    key, gate = says(stage, CALL), threading.Event()
    stage.sglang.script = lambda request: Script(f"I add. {CALL}", piece_tokens=5, gate=gate)
    body = {"messages": QUESTION, "tools": [CHAT_TOOL]}
    stage.http.timeout = scaled(120.0)  # they import SGLang again
    with stage.stream("/v1/chat/completions", body, key) as answer:
        lines = answer.iter_lines()
        while "add" not in next(lines):
            pass
        os.kill(find_parsers(stage), signal.SIGKILL)
        _, other = stage.open_session(TicketRef(1, 0))
        stage.sglang.script = lambda request: Script(CALL)
        assert stage.chat(other, QUESTION, tools=[CHAT_TOOL]).status_code == 200
        gate.set()
        rest = "".join(lines)
    assert "died in the middle of this reply" in rest
    assert "tool_call" not in rest
    assert not stage.journaled(key)


def test_a_call_that_a_limit_cut_is_text_and_ends_by_length(tmp_path: Path) -> None:
    complete = (
        "<tool_call>\n<function=add>\n<parameter=x>\n3\n</parameter>\n"
        "<parameter=y>\n4\n</parameter>\n</function>\n</tool_call>"
    )
    coder = Stage(
        tmp_path,
        model_dir=write_model_dir(tmp_path / "model", template=REASONING_CHATML),
        tool_call_parser="qwen3_coder",
        serve_python=get_interpreter("serve", "auto"),
    )
    try:
        for text, calls in ((complete[: complete.index("</parameter>")], 0), (complete, 1)):
            for stream in (False, True):
                let_say(coder, Script(text, finish="length"))
                _, key = coder.open_session(TicketRef(1, 0))
                answer = coder.chat(key, QUESTION, tools=[CHAT_TOOL], stream=stream)
                assert '"finish_reason":"length"' in answer.text
                (interaction,) = coder.journaled(key)
                assert len(interaction.reply.get("tool_calls", [])) == calls
                assert interaction.reply["content"] == ("" if calls else text)
    finally:
        coder.close()
