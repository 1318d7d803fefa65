"""What agents see of Google's dialect: raw HTTP, as its SDKs send it, against a real proxy."""

from functools import partial
from typing import Any

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
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

STREAMS = pytest.mark.parametrize("verb", [SSE, STREAM])


@pytest.mark.parametrize("verb", [*VERBS, COUNT])
def test_every_version_and_every_place_of_a_key_open_a_session(
    stage: Stage, key: str, verb: str
) -> None:
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
    said = '{"candidates":[{"content":{"role":"model","parts":[{"text":"%s"}]},"index":0'
    usage = (
        '"usageMetadata":{"promptTokenCount":17,"candidatesTokenCount":5,"thoughtsTokenCount":0,'
        '"cachedContentTokenCount":0,"totalTokenCount":22}'
    )
    expected = [
        f"{said % 'hello wor'}}}],{frame}",
        f"{said % 'ld'}}}],{frame}",
        f'{said % ""},"finishReason":"STOP"}}],{usage},{frame}',
    ]
    assert events.text == "".join(f"data: {one}\r\n\r\n" for one in expected)
    array = ask(stage, key, STREAM)
    assert array.headers["content-type"] == "application/json"
    other_id = stage.journaled(key)[1].interaction_id
    whole = ",\r\n".join(expected).replace(interaction.interaction_id, other_id)
    assert array.text == f"[{whole}]"


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
    asked = {
        **{"temperature": 0.7, "topP": 0.9, "topK": 40.0, "maxOutputTokens": 33, "seed": 5},
        **{"stopSequences": ["x", ""], "presencePenalty": 0.5, "frequencyPenalty": -0.5},
    }
    ask_well(stage, key, generationConfig=asked)
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
    for asked, sent in cases:
        ask_well(stage, key, generationConfig=asked)
        params = stage.sglang.requests.pop()["sampling_params"]
        assert {name: params[name] for name in ("json_schema", "ebnf") if name in params} == sent


def _say(script: Script, request: dict[str, Any]) -> Script:
    return script


@pytest.mark.parametrize("verb", VERBS)
def test_log_probabilities_have_googles_shape(stage: Stage, key: str, verb: str) -> None:
    asked = {"responseLogprobs": True, "logprobs": 2}
    responses = ask_well(stage, key, verb, generationConfig=asked)
    results = [
        one["candidates"][0]["logprobsResult"]
        for one in responses
        if "logprobsResult" in one["candidates"][0]
    ]
    (interaction,) = stage.journaled(key)
    ids = [int(i) for i in memoryview(interaction.output_ids).cast("i")]
    chosen = [token for one in results for token in one["chosenCandidates"]]
    assert [token["tokenId"] for token in chosen] == ids
    assert [token["logProbability"] for token in chosen] == [-0.5, -0.501, -0.502, -0.503, -0.504]
    assert "".join(token["token"] for token in chosen[:-1]) == "hello world"
    tops = [one for result in results for one in result["topCandidates"]]
    assert [len(top["candidates"]) for top in tops] == [2] * len(ids)
    assert responses[-1]["candidates"][0]["avgLogprobs"] == pytest.approx(-0.502)


def test_tokens_are_counted_as_the_model_would_read_them(stage: Stage, key: str) -> None:
    more: dict[str, Any] = {"systemInstruction": {"parts": {"text": "Be brief."}}}
    whole = {"model": "models/tiny", "contents": CONTENTS, **more}
    bodies: list[dict[str, Any]] = [
        {"contents": CONTENTS, **more},
        {"generateContentRequest": whole},
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


def test_the_place_of_the_key_tells_whose_list_of_models_is_asked_for(
    stage: Stage, key: str
) -> None:
    tiny = {"name": "models/tiny", "baseModelId": "tiny", **CARD}
    other = {"name": "models/a/b", "baseModelId": "a/b", **CARD}
    headers = {"x-goog-api-key": key}
    for prefix in ("/v1", "/v1beta"):
        listed = stage.http.get(f"{stage.url}{prefix}/models?pageSize=50", headers=headers)
        assert listed.json() == {"models": [tiny]}
        assert stage.http.get(f"{stage.url}{prefix}/models?key={key}").json() == {"models": [tiny]}
        one = stage.http.get(f"{stage.url}{prefix}/models/a/b", headers=headers)
        assert one.json() == other
    openai = stage.http.get(f"{stage.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    assert openai.json()["object"] == "list"


@STREAMS
def test_a_stream_lost_while_it_speaks_ends_with_an_error(stage: Stage, verb: str) -> None:
    odd = [("1.1", 0, 5)]  # not what the relay says: nobody can go on from such tokens
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
    said = parts_of(ask_well(stage, key, verb))
    history = [*CONTENTS, model(*said), user("and 1?")]
    ask_well(stage, key, verb, history)
    # The SDKs' chats keep each chunk of a stream as a content of its own.
    apart = [*CONTENTS, *map(model, said), user("and 1?"), *map(model, said), user("and 2?")]
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
    ids = [one["tool_call_id"] for one in interaction.new_messages if one["role"] == "tool"]
    assert ids == ["call_1", "call_2", "call_3", "gone"]
