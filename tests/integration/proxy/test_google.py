"""Google's dialect works with SGLang's own parsers, and with Google's SDK from its environment."""

import json
import subprocess
from typing import Any

import pytest

from areal_hpc.jobs.config import get_interpreter
from areal_hpc.wire.ledger import TicketRef
from tests.integration.proxy.tool_questions import CALL, THOUGHT, assert_spliced, says
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

PARAMETERS = {
    "type": "OBJECT",
    "properties": {"x": {"type": "INTEGER"}, "y": {"type": "INTEGER"}},
    "required": ["x", "y"],
}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
CONTENTS: list[Any] = [{"role": "user", "parts": [{"text": "What is 3 + 4?"}]}]
TOOLS: dict[str, Any] = {"tools": [{"functionDeclarations": [ADD]}]}
THOUGHTS: dict[str, Any] = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
VERBS = pytest.mark.parametrize(
    "verb", ["generateContent", "streamGenerateContent", "streamGenerateContent?alt=sse"]
)


def ask(
    stage: Stage, key: str, verb: str, contents: Any = CONTENTS, **more: Any
) -> list[dict[str, Any]]:
    answer = stage.http.post(
        f"{stage.url}/v1beta/models/tiny:{verb}",
        json={"contents": contents, **TOOLS, **more},
        headers={"x-goog-api-key": key},
    )
    assert answer.status_code == 200, answer.text
    if "sse" in verb:
        lines = filter(None, answer.text.split("\r\n"))  # a ping is one more empty line
        responses = [json.loads(line.removeprefix("data: ")) for line in lines]
    else:
        responses = answer.json() if verb.startswith("stream") else [answer.json()]
    candidates = [response["candidates"][0] for response in responses]
    assert candidates[-1]["finishReason"] == "STOP"
    return [part for candidate in candidates for part in candidate["content"]["parts"]]


def joined(parts: list[dict[str, Any]]) -> tuple[str, str, list[dict[str, Any]]]:
    texts = {True: "", False: ""}
    for part in parts:
        texts[part.get("thought", False)] += part.get("text", "")
    return texts[True], texts[False], [p["functionCall"] for p in parts if "functionCall" in p]


@VERBS
@pytest.mark.parametrize(
    ("raw", "thought", "text", "calls"),
    [
        (CALL, "", "", 1),
        (f"I add. {CALL}\n{CALL}", "", "I add.", 2),
        (f"{THOUGHT}{CALL}", "add them", "", 1),
        (f"{THOUGHT}Seven.", "add them", "Seven.", 0),
    ],
)
@pytest.mark.parametrize("echo", ["as it came", "without thoughts", "without ids", "other ids"])
def test_a_conversation_goes_on_with_the_models_own_tokens(
    stage: Stage, verb: str, raw: str, thought: str, text: str, calls: int, echo: str
) -> None:
    key = says(stage, raw)
    parts = ask(stage, key, verb, **THOUGHTS)
    thoughts, shown, called = joined(parts)
    assert (thoughts, shown.strip()) == (thought, text)
    assert [call["args"] for call in called] == [{"x": 3, "y": 4}] * calls
    assert len({call["id"] for call in called}) == calls
    if echo != "as it came":
        parts = [part for part in parts if not part.get("thought")]
    for i, call in enumerate(called):
        if echo == "without ids":
            del call["id"]
        elif echo == "other ids":  # the Gemini CLI makes these
            call["id"] = f"add_1795441083044_{i}"
    results: list[dict[str, Any]] = [
        {"functionResponse": {**call, "response": {"output": "7"}, "args": None}} for call in called
    ]
    answered = {"role": "user", "parts": results or [{"text": "Sure?"}]}
    ask(stage, key, verb, [*CONTENTS, {"role": "model", "parts": parts}, answered], **THOUGHTS)
    assert_spliced(stage, raw, calls)


def test_thoughts_are_counted_apart(stage: Stage) -> None:
    key = says(stage, f"{THOUGHT}Seven.")
    url = f"{stage.url}/v1/models/tiny:generateContent"
    answer = stage.http.post(url, json={"contents": CONTENTS}, headers={"x-goog-api-key": key})
    usage = answer.json()["usageMetadata"]
    (interaction,) = stage.journaled(key)
    total, thoughts = len(interaction.output_ids) // 4, len(stage.tokenizer.encode("add them").ids)
    assert usage["thoughtsTokenCount"] == thoughts
    assert usage["candidatesTokenCount"] == total - thoughts
    assert usage["totalTokenCount"] == interaction.prompt_tokens + total


@VERBS
def test_arguments_without_an_object_come_as_text(stage: Stage, verb: str) -> None:
    key = says(stage, CALL.replace('{"x": 3, "y": 4}', '"3 + 4"'))
    _, text, calls = joined(ask(stage, key, verb))
    assert (json.loads(text), calls) == ({"name": "add", "arguments": "3 + 4"}, [])


def choose(mode: str, *names: str) -> dict[str, Any]:
    """Build a request with three functions and the choice among them."""
    others = [{**ADD, "name": name} for name in ("sub", "mul")]
    config = {"mode": mode, **({"allowedFunctionNames": names} if names else {})}
    return {
        "tools": [{"functionDeclarations": [ADD, *others]}],
        "toolConfig": {"functionCallingConfig": config},
    }


def sent(stage: Stage, reply: str, **options: Any) -> dict[str, Any]:
    ask(stage, says(stage, reply), "generateContent", **options)
    (request,) = stage.sglang.requests
    return request


@pytest.mark.parametrize(
    ("asked", "named", "must_call"),
    [
        (choose("ANY"), {"add", "sub", "mul"}, True),
        (choose("ANY", "add"), {"add"}, True),
        (choose("ANY", "add", "mul"), {"add", "mul"}, True),
        (choose("VALIDATED"), {"add", "sub", "mul"}, False),
        (choose("VALIDATED", "sub"), {"sub"}, False),
    ],
)
def test_the_choice_of_functions_becomes_a_grammar(
    stage: Stage, asked: dict[str, Any], named: set[str], must_call: bool
) -> None:
    request = sent(stage, CALL, **asked)
    grammar = request["sampling_params"]["structural_tag"]
    assert {name for name in ("add", "sub", "mul") if f'\\"{name}\\"' in grammar} == named
    form = json.loads(grammar).get("format", json.loads(grammar))
    assert bool(form.get("at_least_one")) is must_call
    assert grammar.count('"required":["x","y"]') == len(named)
    assert request["input_ids"] == sent(stage, "Seven.", **choose("AUTO"))["input_ids"]


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        ({"thinkingBudget": 0}, False),
        ({"thinkingBudget": 8192}, True),
        ({"thinking_budget": 8192, "thinking_level": "HIGH"}, True),
        ({"thinkingBudget": -1}, None),
        ({"thinkingLevel": "LOW", "includeThoughts": True}, True),
    ],
)
def test_the_template_is_told_whether_to_reason(
    stage: Stage, thinking: dict[str, Any], thinks: bool | None
) -> None:
    key = says(stage, "7")
    config = {"generationConfig": {"thinkingConfig": thinking}}
    ask(stage, key, "generateContent", **config)
    (interaction,) = stage.journaled(key)
    variables = json.loads(interaction.context)[1] or {}
    assert variables.get("enable_thinking") is thinks


PROGRAM = r"""
import json
import sys

from google import genai
from google.genai import errors, types

url, key, version = sys.argv[1:]
options = types.HttpOptions(base_url=url, **({"api_version": version} if version else {}))
client = genai.Client(api_key=key, http_options=options)
told = []


def add(x: int, y: int) -> int:
    '''Add two numbers.'''
    return x + y


config = types.GenerateContentConfig(
    system_instruction="Be brief.",
    tools=[add],
    top_k=40.0,
    safety_settings=[
        types.SafetySetting(category="HARM_CATEGORY_HARASSMENT", threshold="BLOCK_NONE")
    ],
    thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_level="LOW"),
)
chat = client.chats.create(model="my/model", config=config)
reply = chat.send_message("add")  # the SDK calls the function by itself
told.append([reply.text, reply.candidates[0].finish_reason.value])
told.append([[part.thought for part in content.parts] for content in chat.get_history()])
chunks = list(chat.send_message_stream("again"))
told.append("".join(chunk.text or "" for chunk in chunks))
told.append(chat.send_message("sure?").text)
asked = dict(model="my/model", contents="hi")
told.append(client.models.count_tokens(**asked).total_tokens)
told.append([model.name for model in client.models.list()])
told.append(client.models.get(model="my/model").input_token_limit)
shape = types.GenerateContentConfig(
    response_mime_type="application/json",
    response_schema=types.Schema(type="OBJECT", properties={"a": types.Schema(type="INTEGER")}),
)
told.append(client.models.generate_content(**asked, config=shape).usage_metadata.prompt_token_count)
for body in ("x y " * 2000, types.Part.from_bytes(data=b"a", mime_type="image/png")):
    for ask in (client.models.generate_content, client.models.generate_content_stream):
        try:
            list(ask(model="m", contents=body))
        except errors.ClientError as error:
            told.append([error.code, error.status, error.message])
try:
    list(client.models.generate_content_stream(model="m", contents="break"))
except errors.ServerError as error:
    told.append([error.code, error.status])
print(json.dumps(told))
"""


@pytest.mark.parametrize("version", ["", "v1", "v1beta"])
def test_googles_sdk_talks_to_the_proxy(stage: Stage, version: str) -> None:
    stage.sglang.requests.clear()
    stage.sglang.incremental = True
    last = f"{THOUGHT}Seven."

    def speak(request: dict[str, Any]) -> Script:
        prompt = stage.prompt_of(request)
        if "break" in prompt:
            odd = [("1.1", 0, 5)]
            return Script("one two three", fault="late_hang_up:1", versions=odd)
        return Script(CALL if "tool\n" not in prompt else last)

    stage.sglang.script = speak
    _, key = stage.open_session(TicketRef(1, 0))
    python = get_interpreter("agents", "auto")
    ended = subprocess.run(
        [python, "-W", "ignore", "-c", PROGRAM, stage.url, key, version],
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert ended.returncode == 0, ended.stderr + stage.log
    data = json.loads(ended.stdout)
    assert data[:4] == [
        ["Seven.", "STOP"],
        [[None], [None], [None], [True, None]],
        "Seven.",
        "Seven.",
    ]
    assert data[4:8] == [12, ["models/tiny"], 2048, 12]
    overflow = "exceeds the maximum number of tokens allowed (2048)."
    image = "contents[0].parts[0].inlineData: "
    for (code, status, message), text in zip(data[8:12], [overflow] * 2 + [image] * 2, strict=True):
        assert (code, status) == (400, "INVALID_ARGUMENT")
        assert text in message
    assert data[12:] == [[503, "UNAVAILABLE"]]
    # Four turns of one conversation, each of which continues the one before.
    turns = [request["input_ids"] for request in stage.sglang.requests[:4]]
    replies = [stage.tokenizer.encode(f"{text}<|im_end|>").ids for text in (CALL, last, last)]
    for before, reply, after in zip(turns, replies, turns[1:], strict=False):
        assert after[: len(before) + len(reply)] == before + reply
    assert stage.sglang.requests[0]["sampling_params"]["top_k"] == 40
