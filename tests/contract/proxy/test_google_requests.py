"""What of Google's requests is honored, has no effect, or is refused, and how errors look."""

from typing import Any

import httpx
import pytest

from tests.contract.proxy.google import CONTENTS, COUNT, GENERATE, VERBS, ask, ask_well, user
from tests.contract.proxy.talk import ignored
from tests.support.proxy_stage import Stage

ROUTE = f"/models/{{model}}:{GENERATE}"
OFF: Any = {"functionCallingConfig": {"mode": "NONE"}}
"""The shared model has no tool-call parser."""
ADD = {"name": "add", "parameters": {"type": "OBJECT"}}


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


def functions(*declared: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"tools": [{"functionDeclarations": [*declared], **other}], "toolConfig": OFF}


def sent(stage: Stage, **more: Any) -> dict[str, Any]:
    """What reaches the engine of a request with more."""
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
    """The parameter that a refusal names."""
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
        asked = {"method": "POST", "url": f"{stage.url}{path}", **request}
        answer = stage.http.request(**asked)
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
