"""Google's dialect, sent raw as its SDKs do, is honored, accepted without effect, or refused."""

from functools import partial
from typing import Any

import httpx
import pytest

from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.google import (
    CONTENTS,
    COUNT,
    GENERATE,
    SSE,
    STREAM,
    VERBS,
    ask,
    ask_well,
    model,
    parts_of,
    responses_of,
    text_of,
    user,
)
from tests.contract.proxy.talk import ignored
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

STREAMS = pytest.mark.parametrize("verb", [SSE, STREAM])


@pytest.mark.parametrize("verb", [*VERBS, COUNT])
def test_every_version_and_place_of_a_key_open_a_session(stage: Stage, key: str, verb: str) -> None:
    ways: list[tuple[str, str, dict[str, str]]] = [
        ("/v1beta", "", {"x-goog-api-key": key}),
        ("/v1", "", {"authorization": f"Bearer {key}"}),
        ("/v1alpha", f"{'&' if '?' in verb else '?'}key={key}", {}),
    ]
    for prefix, query, headers in ways:
        url = f"{stage.url}{prefix}/models/tiny:{verb}{query}"
        answer = stage.http.post(url, json={"contents": CONTENTS}, headers=headers)
        assert answer.status_code == 200, answer.text


def test_a_reply_to_the_byte(stage: Stage, key: str) -> None:
    answer = ask(stage, key)
    (interaction,) = stage.journaled(key)
    assert interaction.interaction_id.startswith("gen_")
    assert answer.text == (
        '{"candidates":[{"content":{"role":"model","parts":[{"text":"hello world"}]},"index":0,'
        '"finishReason":"STOP"}],"usageMetadata":{"promptTokenCount":17,"candidatesTokenCount":5,'
        '"thoughtsTokenCount":0,"cachedContentTokenCount":0,"totalTokenCount":22},'
        f'"modelVersion":"tiny","responseId":"{interaction.interaction_id}"}}'
    )


@pytest.mark.usefixtures("pieces")
def test_a_stream_to_the_byte(stage: Stage, key: str) -> None:
    stage.sglang.script = lambda request: Script(piece_tokens=3)
    events = ask(stage, key, SSE)
    assert events.headers["content-type"] == "text/event-stream"
    (interaction,) = stage.journaled(key)
    frame = f'"modelVersion":"tiny","responseId":"{interaction.interaction_id}"}}'
    candidate = '{"candidates":[{"content":{"role":"model","parts":[{"text":"%s"}]},"index":0'
    usage = (
        '"usageMetadata":{"promptTokenCount":17,"candidatesTokenCount":5,"thoughtsTokenCount":0,'
        '"cachedContentTokenCount":0,"totalTokenCount":22}'
    )
    expected = [
        f"{candidate % 'hello wor'}}}],{frame}",
        f"{candidate % 'ld'}}}],{frame}",
        f'{candidate % ""},"finishReason":"STOP"}}],{usage},{frame}',
    ]
    assert events.text == "".join(f"data: {event}\r\n\r\n" for event in expected)
    array = ask(stage, key, STREAM)
    assert array.headers["content-type"] == "application/json"
    other_id = stage.journaled(key)[1].interaction_id
    array_text = ",\r\n".join(expected).replace(interaction.interaction_id, other_id)
    assert array.text == f"[{array_text}]"


@pytest.mark.parametrize("verb", VERBS)
def test_the_end_says_why(stage: Stage, key: str, verb: str) -> None:
    scripts = {
        "STOP": Script("hello worldSTOP", finish="stop:STOP"),
        "MAX_TOKENS": Script("hello world", finish="length"),
    }
    for reason, script in scripts.items():
        stage.sglang.script = partial(_say, script)
        responses = ask_well(stage, key, verb, generationConfig={"stopSequences": ["STOP"]})
        assert text_of(responses) == "hello world"
        assert all(parts_of([response]) for response in responses)
        reasons = [response["candidates"][0].get("finishReason") for response in responses]
        assert reasons == [None] * (len(responses) - 1) + [reason]


def test_what_is_asked_of_sampling_reaches_the_engine(stage: Stage) -> None:
    _, key = stage.open_session(temperature=0.5, top_p=0.25, max_new_tokens=9)
    ask_well(stage, key)
    config = {
        **{"temperature": 0.7, "topP": 0.9, "topK": 40.0, "maxOutputTokens": 33, "seed": 5},
        **{"stopSequences": ["x", ""], "presencePenalty": 0.5, "frequencyPenalty": -0.5},
    }
    ask_well(stage, key, generationConfig=config)
    silent, loud = (request["sampling_params"] for request in stage.sglang.requests)
    names: tuple[str, ...] = ("temperature", "top_p", "max_new_tokens")
    assert [silent[name] for name in names] == [0.5, 0.25, 9]
    names += ("top_k", "sampling_seed", "stop", "presence_penalty", "frequency_penalty")
    assert [loud[name] for name in names] == [0.7, 0.9, 33, 40, 5, ["x"], 0.5, -0.5]


SCHEMA = {
    "type": "OBJECT",
    "properties": {"b": {"type": "INTEGER", "nullable": True}, "a": {"type": "STRING"}},
    "propertyOrdering": ["a", "b"],
}
BY_SCHEMA = '{"type":"object","properties":{"a":{"type":"string"},"b":{"type":["integer","null"]}}}'
JSON = {"responseMimeType": "application/json"}
ENUM = {"type": "STRING", "format": "enum", "enum": ["yes", 'a "no"']}


def test_formats_of_the_text_reach_the_engine(stage: Stage, key: str) -> None:
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({**JSON, "responseSchema": SCHEMA}, {"json_schema": BY_SCHEMA}),
        ({**JSON, "responseJsonSchema": SCHEMA}, {"json_schema": BY_SCHEMA}),
        (JSON, {"json_schema": '{"anyOf":[{"type":"object"},{"type":"array"}]}'}),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": ENUM},
            {"ebnf": 'root ::= "yes" | "a \\"no\\""'},
        ),
        ({"responseMimeType": "text/plain"}, {}),
    ]
    for config, sent in cases:
        ask_well(stage, key, generationConfig=config)
        params = stage.sglang.requests.pop()["sampling_params"]
        assert {name: params[name] for name in ("json_schema", "ebnf") if name in params} == sent


def _say(script: Script, request: dict[str, Any]) -> Script:
    return script


@pytest.mark.parametrize("verb", VERBS)
def test_log_probabilities_have_googles_shape(stage: Stage, key: str, verb: str) -> None:
    config = {"responseLogprobs": True, "logprobs": 2}
    responses = ask_well(stage, key, verb, generationConfig=config)
    results = [
        response["candidates"][0]["logprobsResult"]
        for response in responses
        if "logprobsResult" in response["candidates"][0]
    ]
    (interaction,) = stage.journaled(key)
    ids = [int(i) for i in memoryview(interaction.output_ids).cast("i")]
    chosen = [token for result in results for token in result["chosenCandidates"]]
    assert [token["tokenId"] for token in chosen] == ids
    assert [token["logProbability"] for token in chosen] == [-0.5, -0.501, -0.502, -0.503, -0.504]
    assert "".join(token["token"] for token in chosen[:-1]) == "hello world"
    tops = [top for result in results for top in result["topCandidates"]]
    assert [len(top["candidates"]) for top in tops] == [2] * len(ids)
    assert responses[-1]["candidates"][0]["avgLogprobs"] == pytest.approx(-0.502)


def test_tokens_are_counted_as_the_model_would_read_them(stage: Stage, key: str) -> None:
    more: dict[str, Any] = {"systemInstruction": {"parts": {"text": "Be brief."}}}
    request = {"model": "models/tiny", "contents": CONTENTS, **more}
    bodies: list[dict[str, Any]] = [
        {"contents": CONTENTS, **more},
        {"generateContentRequest": request},
    ]
    url, headers = f"{stage.url}/v1/models/tiny:{COUNT}", {"x-goog-api-key": key}
    counts = [stage.http.post(url, json=body, headers=headers).json() for body in bodies]
    ask_well(stage, key, **more)
    assert counts == [{"totalTokens": len(stage.sglang.requests[0]["input_ids"])}] * 2
    both = stage.http.post(url, json={**bodies[0], **bodies[1]}, headers=headers)
    assert both.json()["error"]["message"].startswith("contents: give either contents or a ")
    assert stage.end_session(key) == 1


CARD = {
    "version": "1",
    "displayName": "tiny",
    "inputTokenLimit": 2048,
    "outputTokenLimit": 2048,
    "supportedGenerationMethods": [GENERATE, STREAM, COUNT],
    "thinking": False,
}


def test_the_place_of_the_key_tells_whose_models_are_asked_for(stage: Stage, key: str) -> None:
    tiny = {"name": "models/tiny", "baseModelId": "tiny", **CARD}
    other = {"name": "models/a/b", "baseModelId": "a/b", **CARD}
    headers = {"x-goog-api-key": key}
    for prefix in ("/v1", "/v1beta"):
        listed = stage.http.get(f"{stage.url}{prefix}/models?pageSize=50", headers=headers)
        assert listed.json() == {"models": [tiny]}
        assert stage.http.get(f"{stage.url}{prefix}/models?key={key}").json() == {"models": [tiny]}
        listing = stage.http.get(f"{stage.url}{prefix}/models/a/b", headers=headers)
        assert listing.json() == other
    openai = stage.http.get(f"{stage.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    assert openai.json()["object"] == "list"


@STREAMS
def test_a_stream_lost_while_it_speaks_ends_with_an_error(stage: Stage, verb: str) -> None:
    odd = [("1.1", 0, 5)]  # not the relay's message: nobody can continue such tokens
    faults = iter(["late_hang_up:1"])
    stage.sglang.script = lambda request: Script(fault=next(faults, ""), versions=odd)
    _, key = stage.open_session(TicketRef(1, 0))
    first, *_, last = responses_of(ask(stage, key, verb))
    assert text_of([first])
    assert last["error"]["status"] == "UNAVAILABLE"
    assert "lost" in last["error"]["message"]
    assert stage.end_session(key) == 0


@pytest.mark.parametrize("verb", VERBS)
def test_a_conversation_keeps_the_models_own_tokens(stage: Stage, key: str, verb: str) -> None:
    letters = stage.speak_in_letters()
    reply = parts_of(ask_well(stage, key, verb))
    history = [*CONTENTS, model(*reply), user("and 1?")]
    ask_well(stage, key, verb, history)
    # The SDKs' chats keep each chunk of a stream as a separate content.
    apart = [*CONTENTS, *map(model, reply), user("and 1?"), *map(model, reply), user("and 2?")]
    ask_well(stage, key, verb, apart)
    stage.assert_continued(letters)


def test_what_the_model_reads_of_contents(stage: Stage, key: str) -> None:
    calls: list[dict[str, Any]] = [
        {"functionCall": {"name": "add", "args": {"x": 1}}, "thoughtSignature": "c2ln"},
        {"functionCall": {"name": "add", "args": {"x": 2}}},
        {"functionCall": {"name": "sub"}},
    ]
    results = [
        {"functionResponse": {"name": "sub", "response": {"error": "no such number"}}},
        {"functionResponse": {"name": "add", "response": {"output": "7"}}},
        {"functionResponse": {"name": "add", "response": {"output": {"sum": 8}}}},
        {"functionResponse": {"name": "add", "id": "gone", "response": {"a": 1, "b": None}}},
        {"text": "go"},
        {"text": "on"},
    ]
    history = [*CONTENTS, model(*calls), {"role": "function", "parts": results}]
    more: dict[str, Any] = {
        "systemInstruction": {"role": "user", "parts": [{"text": "Be"}, {"text": "brief."}]}
    }
    ask_well(stage, key, contents=history, **more)
    assert stage.prompt_of(stage.sglang.requests[0]) == (
        "<|im_start|>system\nBe\nbrief.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n"
        '<|im_start|>tool\n{"sum":8}<|im_end|>\n<|im_start|>tool\nError: no such number<|im_end|>\n'
        '<|im_start|>tool\n{"a":1,"b":null}<|im_end|>\n<|im_start|>user\ngo\non<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    (interaction,) = stage.journaled(key)
    ids = [turn["tool_call_id"] for turn in interaction.new_messages if turn["role"] == "tool"]
    assert ids == ["call_1", "call_2", "call_3", "gone"]


ROUTE = f"/models/{{model}}:{GENERATE}"
OFF: Any = {"functionCallingConfig": {"mode": "NONE"}}
"""The shared model has no tool-call parser."""
ADD = {"name": "add", "parameters": {"type": "OBJECT"}}


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


def functions(*declared: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"tools": [{"functionDeclarations": [*declared], **other}], "toolConfig": OFF}


def sent(stage: Stage, **more: Any) -> dict[str, Any]:
    """Return the engine's request for a request with further fields."""
    stage.sglang.requests.clear()
    ask_well(stage, stage.open_session()[1], **more)
    (request,) = stage.sglang.requests
    return {part: request[part] for part in ("input_ids", "sampling_params")}


HINTS: dict[str, dict[str, Any]] = {
    "safetySettings": {"safetySettings": [{"category": "C", "threshold": "BLOCK_NONE"}]},
    "generationConfig.speechConfig": config(speechConfig={"languageCode": "de"}),
    "generationConfig.thinkingConfig.thinkingBudget": config(
        thinkingConfig={"includeThoughts": True, "thinkingBudget": 8192}
    ),
    "toolConfig.retrievalConfig": {"toolConfig": {"retrievalConfig": {"languageCode": "de"}}},
    "toolConfig.functionCallingConfig.streamFunctionCallArguments": {
        "toolConfig": {"functionCallingConfig": {"streamFunctionCallArguments": True}}
    },
    "tools[].functionDeclarations[].behavior": functions({**ADD, "behavior": "BLOCKING"}),
    "tools[googleSearch]": functions(ADD, googleSearch={}),
    "tools[computerUse]": functions(ADD, computerUse={}),
}
"""A request with a parameter of each kind that has no effect."""
UNKNOWN: dict[str, dict[str, Any]] = {
    "sparkle": {"sparkle": {"a": 1}},
    "generationConfig.thinkingConfig.sparkle": config(thinkingConfig={"sparkle": 1}),
    "tools[].functionDeclarations[].sparkle": functions({**ADD, "sparkle": 1}),
}
"""Hints of the next release of a client."""


def test_what_has_no_effect_changes_nothing_and_is_counted(stage: Stage) -> None:
    for name, body in {**HINTS, **UNKNOWN}.items():
        plain = sent(stage, **(functions(ADD) if name.startswith("tools[") else {}))
        before = ignored(stage)
        assert sent(stage, **body) == plain, name
        assert ignored(stage) == {**before, (ROUTE, name): before.get((ROUTE, name), 0) + 1}


SNAKE: dict[str, Any] = {
    "system_instruction": {"parts": [{"text": "Be brief."}]},
    "safety_settings": [],
    "tool_config": {"function_calling_config": {"mode": "NONE"}},
    "tools": [{"function_declarations": [{"name": "add", "parameters_json_schema": {}}]}],
    "generation_config": {
        **{"top_p": 0.5, "top_k": 7, "max_output_tokens": 9, "stop_sequences": ["x"]},
        **{"candidate_count": 1, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        "response_mime_type": "application/json",
        "response_schema": {"any_of": [{"type": "ARRAY", "min_items": "1"}]},
        "thinking_config": {"include_thoughts": True},
    },
}
CAMEL: dict[str, Any] = {
    "systemInstruction": SNAKE["system_instruction"],
    "safetySettings": [],
    "toolConfig": OFF,
    "tools": [{"functionDeclarations": [{"name": "add", "parametersJsonSchema": {}}]}],
    "generationConfig": {
        **{"topP": 0.5, "topK": 7, "maxOutputTokens": 9, "stopSequences": ["x"]},
        **{"candidateCount": 1, "presencePenalty": 0.5, "frequencyPenalty": 0.25},
        "responseMimeType": "application/json",
        "responseSchema": {"anyOf": [{"type": "array", "minItems": 1}]},
        "thinkingConfig": {"includeThoughts": True},
    },
}


def test_both_spellings_of_every_key_say_the_same(stage: Stage) -> None:
    camel, snake = sent(stage, **CAMEL), sent(stage, **SNAKE)
    assert snake == camel != sent(stage)
    mixed = {**CAMEL, "generationConfig": SNAKE["generation_config"]}
    assert sent(stage, **mixed) == camel
    call = {"function_call": {"name": "add", "args": {"top_p": 1}}, "thought_signature": "c2ln"}
    result = {"function_response": {"name": "add", "response": {"function_call": 7}}}
    turns = [*CONTENTS, {"role": "model", "parts": [call]}, {"parts": [result]}]
    ask_well(stage, stage.open_session()[1], contents=turns)
    assert '<|im_start|>tool\n{"function_call":7}' in stage.prompt_of(stage.sglang.requests[-1])


@pytest.mark.parametrize("verb", [GENERATE, COUNT])
def test_null_is_absence_whatever_is_null(stage: Stage, key: str, verb: str) -> None:
    described = stage.http.get(f"{stage.url}/openapi.json").json()
    form = "GenerateContentRequest" if verb == GENERATE else "CountTokensRequest"
    properties = described["components"]["schemas"][form]["properties"]
    for name in ("sparkle", *properties.keys() - {"contents"}):
        answer = ask(stage, key, verb, **{name: None})
        assert answer.status_code == 200, answer.text


def field_of(answer: httpx.Response) -> str:
    """Return the parameter that a refusal names."""
    (detail,) = answer.json()["error"]["details"]
    assert detail["@type"] == "type.googleapis.com/google.rpc.BadRequest"
    (violation,) = detail["fieldViolations"]
    assert answer.json()["error"]["message"] == f"{violation['field']}: {violation['description']}"
    return str(violation["field"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    (config(maxOutputToken=1), "generationConfig.maxOutputToken"),
    (config(guided_json={"a": 1}), "generationConfig.guided_json"),
    ({"messages": [{"role": "user"}]}, "messages"),
    (config(topP=2), "generationConfig.topP"),
    (config(topK=1e300), "generationConfig.topK"),
    (config(responseModalities=["TEXT", "AUDIO"]), "generationConfig.responseModalities"),
    (config(responseSchema={}, responseJsonSchema={}), "generationConfig.responseSchema"),
    ({"cachedContent": "cachedContents/a"}, "cachedContent"),
    ({"contents": []}, "contents"),
    ({"contents": [user("a"), {"role": "model", "parts": []}]}, "contents[1]"),
    ({"contents": [{"parts": [{"fileData": {}}]}]}, "contents[0].parts[0].fileData"),
    ({"contents": [{"parts": [{"functionCall": {"name": "a"}}]}]}, "contents[0].parts[0]"),
    (functions({"name": ""}), "tools[0].functionDeclarations[0].name"),
    ({"tools": [{"functionDeclarations": [ADD]}]}, "tools"),
    (
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        "toolConfig.functionCallingConfig",
    ),
    ({"generationConfig": {"topP": 1}, "generation_config": {"top_p": 1}}, "generationConfig"),
]


def test_what_cannot_be_done_is_refused_by_its_name(stage: Stage, key: str) -> None:
    for number, (body, field) in enumerate(REFUSED):
        verb = VERBS[number % len(VERBS)]
        answer = ask(stage, key, verb, **{"contents": CONTENTS, **body})
        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert field_of(answer) == field
    assert stage.sglang.requests == []


@pytest.mark.parametrize("verb", [*VERBS, COUNT])
def test_every_error_has_googles_shape(stage: Stage, key: str, verb: str) -> None:
    def refused(code: int, path: str = f"/v1/models/tiny:{verb}", **request: Any) -> str:
        arguments = {"method": "POST", "url": f"{stage.url}{path}", **request}
        answer = stage.http.request(**arguments)
        assert answer.status_code == code, answer.text
        assert answer.json()["error"]["code"] == code
        return str(answer.json()["error"]["status"])

    keyed: dict[str, Any] = {"headers": {"x-goog-api-key": key}}
    assert refused(401, headers={"x-goog-api-key": "sk-guess"}) == "UNAUTHENTICATED"
    assert refused(401) == "UNAUTHENTICATED"
    assert refused(400, content=b"{", **keyed) == "INVALID_ARGUMENT"
    assert refused(400, content=b'{"generation_config": {', **keyed) == "INVALID_ARGUMENT"
    assert refused(413, content=b" " * 200_000, **keyed) == "INVALID_ARGUMENT"
    assert refused(405, method="GET", **keyed) == "UNIMPLEMENTED"
    assert refused(404, "/v1/interactions", **keyed) == "NOT_FOUND"
    assert refused(405, "/v1beta/models/tiny:embedContent", **keyed) == "UNIMPLEMENTED"
    stage.end_session(key)
    assert refused(403, json={"contents": CONTENTS}, **keyed) == "PERMISSION_DENIED"


@pytest.mark.parametrize("verb", VERBS)
def test_an_overflow_is_told_in_googles_words(stage: Stage, key: str, verb: str) -> None:
    contents = [user("x y " * 2000)]
    tokens = ask_well(stage, key, COUNT, contents)[0]["totalTokens"]
    answer = ask(stage, key, verb, contents)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"The input token count ({tokens}) exceeds the maximum number of tokens allowed (2048)."
    )


def test_a_form_of_the_answer_that_is_none_is_refused(stage: Stage, key: str) -> None:
    answer = ask(stage, key, "streamGenerateContent?alt=proto")
    assert (answer.status_code, field_of(answer)) == (400, "alt")
