"""Tool calls and reasoning in every dialect: SGLang's own parsers, in a process of their own."""

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from anthropic import Anthropic
from anthropic.types import Message

from areal_hpc.jobs.config import get_interpreter
from areal_hpc.wire.ledger import TicketRef
from tests.support.chatml import REASONING_CHATML, write_model_dir
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
ADD = {"name": "add", "description": "Add two numbers."}
CHAT_TOOL: Any = {"type": "function", "function": {**ADD, "parameters": PARAMETERS}}
FUNCTION: Any = {"type": "function", **ADD, "parameters": PARAMETERS, "strict": None}
"""Of Responses."""
TOOL: Any = {**ADD, "input_schema": PARAMETERS}
"""Of Messages."""
QUESTION: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3, "y": 4}}\n</tool_call>'
THOUGHT = "<think>\nadd them\n</think>\n\n"
ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": QUESTION, "tools": [CHAT_TOOL]},
    "messages": {"messages": QUESTION, "tools": [TOOL], "max_tokens": 200},
    "responses": {"input": QUESTION, "tools": [FUNCTION]},
}
"""A question with the tool, by its route."""
UNKNOWN = '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"x": 3\n</tool_call>'
NO_OBJECT = "<tool_call>\n5\n</tool_call>"
"""SGLang's parser raises at it."""


@pytest.fixture(scope="module")
def stage(parsing_stage: Stage) -> Stage:
    return parsing_stage


def let_say(stage: Stage, script: Script) -> None:
    stage.sglang.script = lambda request: script


def says(stage: Stage, text: str, piece_tokens: int = 1) -> str:
    """Let the model say `text`; the key of a new session."""
    stage.sglang.requests.clear()
    stage.sglang.script = lambda request: Script(text, piece_tokens=piece_tokens)
    stage.sglang.incremental = True
    return stage.open_session(TicketRef(1, 0))[1]


def assert_spliced(stage: Stage, said: str, calls: int = 1) -> None:
    """The last request reads what the model said, token by token, and then how it was answered."""
    before, after = (request["input_ids"] for request in stage.sglang.requests[-2:])
    own = stage.tokenizer.encode(said + "<|im_end|>").ids
    assert after[: len(before) + len(own)] == before + own
    rest = stage.tokenizer.decode(after[len(before) + len(own) :], skip_special_tokens=False)
    tail = "<|im_start|>tool\n7<|im_end|>\n" * calls or "<|im_start|>user\nSure?<|im_end|>\n"
    assert rest == f"\n{tail}<|im_start|>assistant\n"


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
    said: str,
    content: str | None,
    reasoning: str | None,
    calls: int,
    piece_tokens: int,
) -> None:
    key = says(stage, said, piece_tokens or 1)
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
    found = message.get("tool_calls") or []
    arguments = [json.loads(call["function"]["arguments"]) for call in found]
    assert arguments == [{"x": 3, "y": 4}] * calls
    assert len({call["id"] for call in found}) == calls
    (interaction,) = stage.journaled(key)
    raw = stage.tokenizer.decode([int(i) for i in memoryview(interaction.output_ids).cast("i")])
    assert raw.startswith(said)


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
    # As SDKs give it back: other spacing, no nulls, no reasoning.
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
        asked: Any = {"model": "m", "messages": QUESTION, "tools": [CHAT_TOOL], "stream": True}
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
            "tools": [{"type": "function"} | one for one in functions],
        }
        allowed: list[Any] = [{"type": "function", "name": "sub"}, {"type": "mcp"}]
        choice: dict[str, Any] = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    else:
        tools = [{"type": "function", "function": one} for one in functions]
        body = {"messages": QUESTION, "tools": tools}
        allowed = [{"type": "function", "function": {"name": "sub"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    for more in ({}, {"tool_choice": choice}):
        answer = stage.post(route, body | more, key)
        assert answer.status_code == 200, answer.text
    free, bound = stage.sglang.requests[-2:]
    assert free["input_ids"] == bound["input_ids"]
    assert [len(one.reply.get("tool_calls", [])) for one in stage.journaled(key)] == [1, 0]
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
    """The parser process of the stage's proxy."""
    threads = Path(f"/proc/{stage.pid}/task").glob("*/children")
    (parsers,) = {int(pid) for path in threads for pid in path.read_text().split()}
    return parsers


def test_a_stream_in_whose_middle_the_parsers_died_fails_and_is_no_garbled_text(
    stage: Stage,
) -> None:
    key, gate = says(stage, CALL), threading.Event()
    stage.sglang.script = lambda request: Script(f"I add. {CALL}", piece_tokens=5, gate=gate)
    asked = {"messages": QUESTION, "tools": [CHAT_TOOL], "stream": True}
    url, headers = f"{stage.url}/v1/chat/completions", {"authorization": f"Bearer {key}"}
    stage.http.timeout = scaled(120.0)  # they import SGLang again
    with stage.http.stream("POST", url, json=asked, headers=headers) as answer:
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


# In the other dialects ---------------------------------------------------------------------------


SAID = pytest.mark.parametrize(
    ("said", "kinds"),
    [
        (CALL, ["call"]),
        (f"I add. {CALL}\n{CALL}", ["text", "call", "call"]),
        (f"{THOUGHT}{CALL}", ["reasoning", "call"]),
        (f"{THOUGHT}Seven.", ["reasoning", "text"]),
    ],
)
BLOCKS = {"tool_use": "call", "thinking": "reasoning", "text": "text"}
ITEMS = {"function_call": "call", "reasoning": "reasoning", "message": "text"}


def message_of(client: Anthropic, streams: bool, **asked: Any) -> Message:
    if not streams:
        return cast("Message", client.messages.create(**asked))
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
@SAID
def test_anthropics_blocks_come_back_as_the_models_own_tokens(
    stage: Stage, said: str, kinds: list[str], streams: bool
) -> None:
    key = says(stage, said)
    asked: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL]}
    with stage.anthropic(key) as client:
        message = message_of(client, streams, messages=QUESTION, **asked)
        assert [BLOCKS[block.type] for block in message.content] == kinds
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"x": 3, "y": 4}] * len(calls)
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        reply: Any = {"role": "assistant", "content": message.content}
        result = {"type": "tool_result", "content": "7"}
        results = [{**result, "tool_use_id": call.id} for call in calls]
        answer: Any = {"role": "user", "content": results or "Sure?"}
        client.messages.create(messages=[*QUESTION, reply, answer], **asked)
    assert_spliced(stage, said, len(calls))


@pytest.mark.parametrize("streams", [False, True])
@SAID
def test_items_keep_their_tokens(stage: Stage, said: str, kinds: list[str], streams: bool) -> None:
    key = says(stage, said)
    with stage.client(key) as client:
        if streams:
            with client.responses.stream(model="m", input=QUESTION, tools=[FUNCTION]) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(model="m", input=QUESTION, tools=[FUNCTION])
        assert [ITEMS[item.type] for item in response.output] == kinds
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"x": 3, "y": 4}] * len(calls)
        # Agents hand items back as they came.
        items: list[Any] = [item.to_dict() for item in response.output]
        result = {"type": "function_call_output", "output": "7"}
        results = [{**result, "call_id": call.call_id} for call in calls]
        asked = results or [{"role": "user", "content": "Sure?"}]
        history: Any = [*QUESTION, *items, *asked]
        client.responses.create(model="m", input=history, tools=[FUNCTION])
        assert_spliced(stage, said, len(calls))
        following: Any = {"input": asked, "previous_response_id": response.id}
        client.responses.create(model="m", tools=[FUNCTION], **following)
    assert stage.sglang.requests[-1]["input_ids"] == stage.sglang.requests[-2]["input_ids"]


def test_a_tool_in_a_namespace_is_called_by_both_names(stage: Stage) -> None:
    said = CALL.replace("add", "sums.add")
    key = says(stage, said)
    space: Any = {"type": "namespace", "name": "sums", "description": "", "tools": [FUNCTION]}
    with stage.client(key) as client:
        response = client.responses.create(model="m", input=QUESTION, tools=[space])
        (call,) = response.output
        assert call.type == "function_call"
        assert (call.namespace, call.name) == ("sums", "add")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        history: Any = [*QUESTION, call.to_dict(), result]
        client.responses.create(model="m", input=history, tools=[space])
    assert_spliced(stage, said)


@pytest.mark.parametrize("streams", [False, True])
def test_arguments_without_an_object_stay_text_for_anthropic(stage: Stage, streams: bool) -> None:
    key = says(stage, CALL.replace('{"x": 3, "y": 4}', '"3 + 4"'))
    with stage.anthropic(key) as client:
        asked: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL], "messages": QUESTION}
        message = message_of(client, streams, **asked)
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text) == {"name": "add", "arguments": "3 + 4"}
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("route", "asked", "thinks"),
    [
        ("responses", {"reasoning": {"effort": "none"}}, False),
        ("responses", {"reasoning": {"effort": "high"}}, True),
        ("chat/completions", {"reasoning_effort": "none"}, False),
        ("chat/completions", {"enable_thinking": False}, False),
        ("chat/completions", {"thinking": {"type": "disabled"}}, False),
        ("chat/completions", {"reasoning": {"enabled": False}}, False),
        ("messages", {"output_config": {"effort": "max"}}, True),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ("messages", {"thinking": {"type": "adaptive", "display": "omitted"}}, True),
        ("messages", {"thinking": {"type": "adaptive"}}, True),
        ("messages", {"thinking": {"type": "disabled"}}, False),
    ],
)
def test_template_thinking(stage: Stage, route: str, asked: dict[str, Any], thinks: bool) -> None:
    key = says(stage, "7")
    body = {**ASKED[route], "tools": [], **asked}
    answer = stage.post(f"/v1/{route}", body, key)
    assert answer.status_code == 200, answer.text
    (interaction,) = stage.journaled(key)
    assert json.loads(interaction.context)[1] == {"enable_thinking": thinks}
    ended = stage.prompt_of(stage.sglang.requests[-1]).endswith("</think>\n\n")
    assert ended is not thinks
    assert "effort" not in stage.http.get(f"{stage.url}/metrics").text


def ask(stage: Stage, route: str, said: str, **more: Any) -> dict[str, Any]:
    """The request that reaches the model when it is asked with its tool."""
    key = says(stage, said)
    answer = stage.post(f"/v1/{route}", {**ASKED[route], **more}, key)
    assert answer.status_code == 200, answer.text
    (request,) = stage.sglang.requests
    return request


CHOSEN = {"type": "function", "function": {"name": "add"}}
JSON = {"type": "json_object"}
FIRST = {"stop_after_first": True}
ONE_CALL = {"type": "auto", "disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    ("route", "asked", "tag"),
    [
        ("chat/completions", {"tool_choice": "required"}, {"at_least_one": True}),
        ("chat/completions", {"tool_choice": CHOSEN}, {"at_least_one": True}),
        ("chat/completions", {"parallel_tool_calls": False}, {**FIRST, "at_least_one": False}),
        (
            "chat/completions",
            {"tool_choice": "required", "parallel_tool_calls": False},
            {**FIRST, "at_least_one": True},
        ),
        ("messages", {"tool_choice": {"type": "any"}}, {"at_least_one": True}),
        ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, {"at_least_one": True}),
        ("messages", {"tool_choice": ONE_CALL}, FIRST),
    ],
)
def test_what_is_asked_of_tool_calls_becomes_a_grammar(
    stage: Stage, route: str, asked: dict[str, Any], tag: dict[str, Any]
) -> None:
    params = ask(stage, route, CALL, **asked)["sampling_params"]
    grammar = json.loads(params["structural_tag"])
    grammar = grammar.get("format", grammar)
    assert {name: grammar[name] for name in tag} == tag
    # The tool is not `strict`: what must be called is held to its schema all the same.
    schema = json.dumps(PARAMETERS, separators=(",", ":"))
    holds_schema = schema in params["structural_tag"].replace(" ", "")
    assert holds_schema is grammar.get("at_least_one", False)
    assert params["skip_special_tokens"] is False


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("chat/completions", {"tool_choice": "required", "response_format": JSON}),
        (
            "responses",
            {
                "tools": [FUNCTION, {"type": "web_search"}],
                "tool_choice": {"type": "function", "name": "add"},
                "text": {"format": JSON},
            },
        ),
        (
            "messages",
            {
                "tool_choice": {"type": "tool", "name": "add"},
                "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
            },
        ),
    ],
)
def test_the_format_of_the_text_does_not_bind_a_call_that_must_be_made(
    stage: Stage, route: str, asked: dict[str, Any]
) -> None:
    request = ask(stage, route, CALL, **asked)
    assert "json_schema" not in request["sampling_params"]
    assert "structural_tag" in request["sampling_params"]
    assert "web_search" not in stage.tokenizer.decode(request["input_ids"])


OLD: Any = {"functions": [CHAT_TOOL["function"]], "function_call": "auto"}
"""How OpenAI's older clients offer the tool."""


def test_an_older_client_gets_its_call_as_a_function_call_and_goes_on(stage: Stage) -> None:
    key = says(stage, CALL)
    with stage.client(key) as client:
        asked: Any = {"model": "m", "messages": QUESTION, **OLD}
        choice = client.chat.completions.create(**asked).choices[0]
        called = choice.message.function_call
        assert called is not None
        assert (choice.finish_reason, called.name) == ("function_call", "add")
        assert json.loads(called.arguments) == {"x": 3, "y": 4}
        result = {"role": "function", "name": "add", "content": "7"}
        asked["messages"] = [*QUESTION, choice.message.to_dict(), result]
        client.chat.completions.create(**asked)
        assert_spliced(stage, CALL)
        chunks = [*client.chat.completions.create(**{**asked, "messages": QUESTION}, stream=True)]
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert "".join(one.arguments or "" for one in deltas if one) == called.arguments
    assert [one.name for one in deltas if one and one.name] == ["add"]
    assert chunks[-1].choices[0].finish_reason == "function_call"


def test_vercels_references_stand_for_reasoning_text_and_calls(stage: Stage) -> None:
    """Its SDK hands back the ids of items that the server is to have stored."""
    key = says(stage, f"{THOUGHT}I add. {CALL}\n{CALL}")
    asked = dict(ASKED["responses"])
    said = stage.post("/v1/responses", asked, key).json()
    items = said["output"]
    assert [one["type"] for one in items] == ["reasoning", "message", *["function_call"] * 2]
    references = [{"type": "item_reference", "id": one["id"]} for one in items]
    results = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "7"}
        for one in items[2:]
    ]
    asked["input"] = [*QUESTION, *references, *results]
    assert stage.post("/v1/responses", asked, key).status_code == 200
    assert_spliced(stage, f"{THOUGHT}I add. {CALL}\n{CALL}", calls=2)


def test_a_begun_reply_is_parsed_and_continued(stage: Stage) -> None:
    key = says(stage, f" add. {CALL}")
    begun = [*QUESTION, {"role": "assistant", "content": "I"}]
    asked = {**ASKED["messages"], "messages": begun}
    said = stage.post("/v1/messages", asked, key).json()["content"]
    assert [one["type"] for one in said] == ["text", "tool_use"]
    said[0]["text"] = "I" + said[0]["text"]
    result = {"type": "tool_result", "tool_use_id": said[1]["id"], "content": "7"}
    history = [*QUESTION, {"role": "assistant", "content": said}]
    asked["messages"] = [*history, {"role": "user", "content": [result]}]
    assert stage.post("/v1/messages", asked, key).status_code == 200
    assert_spliced(stage, f" add. {CALL}")


PATCH: Any = {"type": "custom", "name": "patch", "description": "Changes files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
PATCH_CALL = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+a"}}\n</tool_call>'
)


def test_a_custom_tool_is_called_with_a_text_and_goes_on(stage: Stage) -> None:
    key = says(stage, PATCH_CALL)
    asked: dict[str, Any] = {"input": QUESTION, "tools": [{**PATCH, "format": LARK}]}
    (item,) = stage.post("/v1/responses", asked, key).json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
    assert (item["input"], item["id"][:4]) == ("*** Begin\n+a", "ctc_")
    told = stage.prompt_of(stage.sglang.requests[-1])
    assert "Changes files." in told
    assert "Its input follows this lark grammar" in told
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "7"}
    for said in (item, {"type": "item_reference", "id": item["id"]}):
        later = {**asked, "input": [*QUESTION, said, result]}
        assert stage.post("/v1/responses", later, key).status_code == 200
        assert_spliced(stage, PATCH_CALL)
        stage.sglang.requests.pop()
    with (
        stage.client(key) as client,
        client.responses.create(model="m", stream=True, **asked) as stream,
    ):
        events = {event.type: event for event in stream}
    done: Any = events["response.custom_tool_call_input.done"]
    delta: Any = events["response.custom_tool_call_input.delta"]
    assert done.input == delta.delta == item["input"]


def build_chat_patch(form: dict[str, str]) -> dict[str, Any]:
    """The same tool as chat completions have it."""
    grammar = {name: value for name, value in form.items() if name != "type"}
    about = {"name": "patch", "description": "Changes files."}
    return {
        "type": "custom",
        "custom": {**about, "format": {"type": "grammar", "grammar": grammar}},
    }


@pytest.mark.parametrize("streams", [False, True])
def test_a_custom_tool_of_a_chat_is_called_with_a_text_and_goes_on(
    stage: Stage, streams: bool
) -> None:
    said = f"{PATCH_CALL}\n{CALL}"
    key = says(stage, said)
    tools = [build_chat_patch(LARK), CHAT_TOOL]
    with stage.client(key) as client:
        if streams:
            chunks = client.chat.completions.create(
                model="m", messages=QUESTION, tools=tools, stream=True
            )
            given = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
            custom: Any = given[-1].model_dump(exclude_none=True)
            assert custom.pop("index") == 0, "its place among the calls"
            assert {part.index for part in given[:-1]} == {1}
        else:
            answer = client.chat.completions.create(model="m", messages=QUESTION, tools=tools)
            custom, function = (
                call.model_dump() for call in answer.choices[0].message.tool_calls or ()
            )
            assert (function["type"], function["function"]["name"]) == ("function", "add")
    assert custom["type"] == "custom"
    assert custom["custom"] == {"name": "patch", "input": "*** Begin\n+a"}
    told = stage.prompt_of(stage.sglang.requests[-1])
    assert "Changes files." in told
    assert "Its input follows this lark grammar" in told
    add = {"id": "call_2", "type": "function",
           "function": {"name": "add", "arguments": '{"x": 3, "y": 4}'}}  # fmt: skip
    results = [{"role": "tool", "tool_call_id": one, "content": "7"}
               for one in (custom["id"], "call_2")]  # fmt: skip
    history = [*QUESTION, {"role": "assistant", "tool_calls": [custom, add]}, *results]
    assert stage.chat(key, history, tools=tools).status_code == 200
    assert_spliced(stage, said, calls=2)


def test_a_chat_may_demand_a_custom_tool_whose_input_has_a_form(stage: Stage) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
    chosen = {"type": "custom", "custom": {"name": "patch"}}
    tools = [build_chat_patch(form)]
    asked = ask(stage, "chat/completions", PATCH_CALL, tools=tools, tool_choice=chosen)
    assert "[a-c]+" in asked["sampling_params"]["structural_tag"]
    wrong = [*QUESTION, {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "custom"}]}]
    refused = stage.chat(says(stage, "x"), wrong, tools=tools)
    assert refused.status_code == 400
    assert "messages[1].tool_calls[0]" in refused.text


def test_a_call_that_a_limit_cut_is_text_and_ends_by_length(tmp_path: Path) -> None:
    whole = (
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
        for text, calls in ((whole[: whole.index("</parameter>")], 0), (whole, 1)):
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
