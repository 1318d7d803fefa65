"""Tool calls, reasoning, their grammars and custom tools work in the dialects."""

import json
from typing import Any, cast

import pytest
from anthropic import Anthropic
from anthropic.types import Message

from tests.integration.proxy.tool_questions import (
    ASKED,
    CALL,
    CHAT_TOOL,
    FUNCTION,
    PARAMETERS,
    QUESTION,
    THOUGHT,
    TOOL,
    ask,
    assert_spliced,
    says,
)
from tests.support.proxy_stage import Stage

SAID = pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (CALL, ["call"]),
        (f"I add. {CALL}\n{CALL}", ["text", "call", "call"]),
        (f"{THOUGHT}{CALL}", ["reasoning", "call"]),
        (f"{THOUGHT}Seven.", ["reasoning", "text"]),
    ],
)
BLOCKS = {"tool_use": "call", "thinking": "reasoning", "text": "text"}
ITEMS = {"function_call": "call", "reasoning": "reasoning", "message": "text"}


def message_of(client: Anthropic, streams: bool, **options: Any) -> Message:
    if not streams:
        return cast("Message", client.messages.create(**options))
    with client.messages.stream(**options) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
@SAID
def test_anthropics_blocks_come_back_as_the_models_own_tokens(
    stage: Stage, text: str, kinds: list[str], streams: bool
) -> None:
    key = says(stage, text)
    options: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL]}
    with stage.anthropic(key) as client:
        message = message_of(client, streams, messages=QUESTION, **options)
        assert [BLOCKS[block.type] for block in message.content] == kinds
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"x": 3, "y": 4}] * len(calls)
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        reply: Any = {"role": "assistant", "content": message.content}
        result = {"type": "tool_result", "content": "7"}
        results = [{**result, "tool_use_id": call.id} for call in calls]
        answer: Any = {"role": "user", "content": results or "Sure?"}
        client.messages.create(messages=[*QUESTION, reply, answer], **options)
    assert_spliced(stage, text, len(calls))


@pytest.mark.parametrize("streams", [False, True])
@SAID
def test_items_keep_their_tokens(stage: Stage, text: str, kinds: list[str], streams: bool) -> None:
    key = says(stage, text)
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
        questions = results or [{"role": "user", "content": "Sure?"}]
        history: Any = [*QUESTION, *items, *questions]
        client.responses.create(model="m", input=history, tools=[FUNCTION])
        assert_spliced(stage, text, len(calls))
        following: Any = {"input": questions, "previous_response_id": response.id}
        client.responses.create(model="m", tools=[FUNCTION], **following)
    assert stage.sglang.requests[-1]["input_ids"] == stage.sglang.requests[-2]["input_ids"]


def test_a_tool_in_a_namespace_is_called_by_both_names(stage: Stage) -> None:
    text = CALL.replace("add", "sums.add")
    key = says(stage, text)
    space: Any = {"type": "namespace", "name": "sums", "description": "", "tools": [FUNCTION]}
    with stage.client(key) as client:
        response = client.responses.create(model="m", input=QUESTION, tools=[space])
        (call,) = response.output
        assert call.type == "function_call"
        assert (call.namespace, call.name) == ("sums", "add")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        history: Any = [*QUESTION, call.to_dict(), result]
        client.responses.create(model="m", input=history, tools=[space])
    assert_spliced(stage, text)


@pytest.mark.parametrize("streams", [False, True])
def test_arguments_without_an_object_stay_text_for_anthropic(stage: Stage, streams: bool) -> None:
    key = says(stage, CALL.replace('{"x": 3, "y": 4}', '"3 + 4"'))
    with stage.anthropic(key) as client:
        options: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL], "messages": QUESTION}
        message = message_of(client, streams, **options)
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
    # The tool is not `strict`: a required call is held to its schema all the same.
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
"""Tool in the form of OpenAI's older clients."""


def test_an_older_client_gets_its_call_as_a_function_call_and_goes_on(stage: Stage) -> None:
    key = says(stage, CALL)
    with stage.client(key) as client:
        options: Any = {"model": "m", "messages": QUESTION, **OLD}
        choice = client.chat.completions.create(**options).choices[0]
        called = choice.message.function_call
        assert called is not None
        assert (choice.finish_reason, called.name) == ("function_call", "add")
        assert json.loads(called.arguments) == {"x": 3, "y": 4}
        result = {"role": "function", "name": "add", "content": "7"}
        options["messages"] = [*QUESTION, choice.message.to_dict(), result]
        client.chat.completions.create(**options)
        assert_spliced(stage, CALL)
        chunks = [*client.chat.completions.create(**{**options, "messages": QUESTION}, stream=True)]
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert "".join(delta.arguments or "" for delta in deltas if delta) == called.arguments
    assert [delta.name for delta in deltas if delta and delta.name] == ["add"]
    assert chunks[-1].choices[0].finish_reason == "function_call"


def test_vercels_references_stand_for_reasoning_text_and_calls(stage: Stage) -> None:
    """The SDK sends back ids of items that the server is to have stored."""
    key = says(stage, f"{THOUGHT}I add. {CALL}\n{CALL}")
    body = dict(ASKED["responses"])
    response = stage.post("/v1/responses", body, key).json()
    items = response["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", *["function_call"] * 2]
    references = [{"type": "item_reference", "id": item["id"]} for item in items]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
        for item in items[2:]
    ]
    body["input"] = [*QUESTION, *references, *results]
    assert stage.post("/v1/responses", body, key).status_code == 200
    assert_spliced(stage, f"{THOUGHT}I add. {CALL}\n{CALL}", calls=2)


def test_a_begun_reply_is_parsed_and_continued(stage: Stage) -> None:
    key = says(stage, f" add. {CALL}")
    begun = [*QUESTION, {"role": "assistant", "content": "I"}]
    body = {**ASKED["messages"], "messages": begun}
    content = stage.post("/v1/messages", body, key).json()["content"]
    assert [block["type"] for block in content] == ["text", "tool_use"]
    content[0]["text"] = "I" + content[0]["text"]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "7"}
    history = [*QUESTION, {"role": "assistant", "content": content}]
    body["messages"] = [*history, {"role": "user", "content": [result]}]
    assert stage.post("/v1/messages", body, key).status_code == 200
    assert_spliced(stage, f" add. {CALL}")


PATCH: Any = {"type": "custom", "name": "patch", "description": "Changes files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
PATCH_CALL = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+a"}}\n</tool_call>'
)


def test_a_custom_tool_is_called_with_a_text_and_goes_on(stage: Stage) -> None:
    key = says(stage, PATCH_CALL)
    options: dict[str, Any] = {"input": QUESTION, "tools": [{**PATCH, "format": LARK}]}
    (item,) = stage.post("/v1/responses", options, key).json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
    assert (item["input"], item["id"][:4]) == ("*** Begin\n+a", "ctc_")
    prompt = stage.prompt_of(stage.sglang.requests[-1])
    assert "Changes files." in prompt
    assert "Its input follows this lark grammar" in prompt
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "7"}
    for reference in (item, {"type": "item_reference", "id": item["id"]}):
        later = {**options, "input": [*QUESTION, reference, result]}
        assert stage.post("/v1/responses", later, key).status_code == 200
        assert_spliced(stage, PATCH_CALL)
        stage.sglang.requests.pop()
    with (
        stage.client(key) as client,
        client.responses.create(model="m", stream=True, **options) as stream,
    ):
        events = {event.type: event for event in stream}
    end: Any = events["response.custom_tool_call_input.done"]
    delta: Any = events["response.custom_tool_call_input.delta"]
    assert end.input == delta.delta == item["input"]


def build_chat_patch(form: dict[str, str]) -> dict[str, Any]:
    """Build the same tool in the form of chat completions."""
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
    text = f"{PATCH_CALL}\n{CALL}"
    key = says(stage, text)
    tools = [build_chat_patch(LARK), CHAT_TOOL]
    with stage.client(key) as client:
        if streams:
            chunks = client.chat.completions.create(
                model="m", messages=QUESTION, tools=tools, stream=True
            )
            parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
            custom: Any = parts[-1].model_dump(exclude_none=True)
            assert custom.pop("index") == 0, "its place among the calls"
            assert {part.index for part in parts[:-1]} == {1}
        else:
            answer = client.chat.completions.create(model="m", messages=QUESTION, tools=tools)
            custom, function = (
                call.model_dump() for call in answer.choices[0].message.tool_calls or ()
            )
            assert (function["type"], function["function"]["name"]) == ("function", "add")
    assert custom["type"] == "custom"
    assert custom["custom"] == {"name": "patch", "input": "*** Begin\n+a"}
    prompt = stage.prompt_of(stage.sglang.requests[-1])
    assert "Changes files." in prompt
    assert "Its input follows this lark grammar" in prompt
    add = {"id": "call_2", "type": "function",
           "function": {"name": "add", "arguments": '{"x": 3, "y": 4}'}}  # fmt: skip
    results = [{"role": "tool", "tool_call_id": call_id, "content": "7"}
               for call_id in (custom["id"], "call_2")]  # fmt: skip
    history = [*QUESTION, {"role": "assistant", "tool_calls": [custom, add]}, *results]
    assert stage.chat(key, history, tools=tools).status_code == 200
    assert_spliced(stage, text, calls=2)


def test_a_chat_may_demand_a_custom_tool_whose_input_has_a_form(stage: Stage) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
    chosen = {"type": "custom", "custom": {"name": "patch"}}
    tools = [build_chat_patch(form)]
    request = ask(stage, "chat/completions", PATCH_CALL, tools=tools, tool_choice=chosen)
    assert "[a-c]+" in request["sampling_params"]["structural_tag"]
    wrong = [*QUESTION, {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "custom"}]}]
    refused = stage.chat(says(stage, "x"), wrong, tools=tools)
    assert refused.status_code == 400
    assert "messages[1].tool_calls[0]" in refused.text
