"""What holds in every dialect, and when a conversation changes from one to another."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import pytest
from anthropic import APIStatusError
from openai import APIError

from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.talk import LEAST, QUESTION, ask_least
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import MUCH_CHARS, TALKATIVE, Script

Texts = Generator[str, None, None]
Reader = Callable[[Stage, str], Texts]


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/chat/completions", LEAST["/chat/completions"]),
        ("/completions", LEAST["/completions"]),
        ("/messages?beta=true", LEAST["/messages"]),
        ("/messages/count_tokens?beta=true", LEAST["/messages"]),
        ("/responses", LEAST["/responses"]),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_both_prefixes_and_both_kinds_of_key_open_a_session(
    stage: Stage, key: str, prefix: str, header: str, route: str, body: dict[str, Any]
) -> None:
    headers = {header: f"Bearer {key}" if header == "authorization" else key}
    headers["anthropic-version"] = "2023-06-01"
    answer = stage.http.post(f"{stage.url}{prefix}{route}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("middle", ["messages", "responses"])
def test_a_conversation_may_change_its_dialect(stage: Stage, key: str, middle: str) -> None:
    letters = stage.speak_in_letters()
    first = stage.chat(key, QUESTION).json()
    history = [*QUESTION, {"role": "assistant", "content": "hello"}]
    history.append({"role": "user", "content": "and 1?"})
    if middle == "messages":
        body = {"messages": history, "max_tokens": 64}
        assert stage.post("/v1/messages", body, key).status_code == 200
    else:
        asked = {"input": "and 1?", "previous_response_id": first["id"]}
        assert stage.post("/v1/responses", asked, key).json()["status"] == "incomplete"
    history += [history[1], {"role": "user", "content": "and 2?"}]
    for route in ("chat/completions", "messages"):
        stage.post(f"/v1/{route}", {"messages": history, "max_tokens": 9}, key)
        stage.assert_continued(letters)
        stage.sglang.requests.pop()


@pytest.mark.parametrize(
    ("route", "limit"),
    [
        ("/chat/completions", {"max_tokens": 2040}),
        ("/chat/completions", {"max_completion_tokens": 2048}),
        ("/completions", {"max_tokens": 2048}),
        ("/messages", {"max_tokens": 32000}),
        ("/responses", {"max_output_tokens": 2048}),
        ("/chat/completions", {}),
    ],
)
def test_a_limit_beyond_the_context_is_cut(stage: Stage, route: str, limit: dict[str, Any]) -> None:
    _, key = stage.open_session(max_new_tokens=2048)
    ask_least(stage, key, route, **limit)
    (request,) = stage.sglang.requests
    assert request["sampling_params"]["max_new_tokens"] == 2048 - len(request["input_ids"])


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FORM = {"type": "json_schema", "name": "n", "schema": SCHEMA}
CHAT_FORM = {"type": "json_schema", "json_schema": FORM}
BY_SCHEMA = {"json_schema": '{"type":"object","properties":{"x":{"type":"integer"}}}'}
JSON = {"type": "json_object"}
ANY_JSON = {"json_schema": '{"type":"object"}'}


@pytest.mark.parametrize(
    ("route", "asked", "sent"),
    [
        ("/chat/completions", {"response_format": CHAT_FORM}, BY_SCHEMA),
        ("/chat/completions", {"response_format": JSON}, ANY_JSON),
        ("/chat/completions", {"response_format": {"type": "text"}}, {}),
        ("/chat/completions", {"regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ("/chat/completions", {"ebnf": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ("/chat/completions", {"logit_bias": {"5": 2.5}}, {"logit_bias": {"5": 2.5}}),
        ("/messages", {"output_config": {"format": FORM}}, BY_SCHEMA),
        ("/responses", {"text": {"format": FORM}}, BY_SCHEMA),
        ("/responses", {"text": {"format": JSON}}, ANY_JSON),
        ("/responses", {"text": {"format": {"type": "text"}}}, {}),
    ],
)
def test_grammars_and_biases_reach_the_engine(
    stage: Stage, key: str, route: str, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    ask_least(stage, key, route, **asked)
    params = stage.sglang.requests[-1]["sampling_params"]
    names = {"json_schema", "regex", "ebnf", "logit_bias"}
    assert {name: params[name] for name in names & params.keys()} == sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", LEAST)
def test_refusals_blame_the_request(stage: Stage, key: str, route: str, stream: bool) -> None:
    stage.sglang.script = lambda request: Script(fault="400")
    answer = stage.post(f"/v1{route}", {**LEAST[route], "stream": stream}, key)
    assert answer.status_code == 400
    assert "too warm" in answer.json()["error"]["message"]


def read_chat(stage: Stage, key: str) -> Texts:
    with (
        stage.client(key) as client,
        client.chat.completions.create(model="m", messages=QUESTION, stream=True) as stream,
    ):
        for chunk in stream:
            yield chunk.choices[0].delta.content or ""


def read_completion(stage: Stage, key: str) -> Texts:
    with (
        stage.client(key) as client,
        client.completions.create(model="m", prompt="hi", stream=True) as stream,
    ):
        for chunk in stream:
            yield chunk.choices[0].text


def read_messages(stage: Stage, key: str) -> Texts:
    with (
        stage.anthropic(key) as client,
        client.messages.stream(model="m", max_tokens=900, messages=QUESTION) as stream,
    ):
        yield from stream.text_stream


def read_response(stage: Stage, key: str) -> Texts:
    with (
        stage.client(key) as client,
        client.responses.create(model="m", input="hi", stream=True) as stream,
    ):
        for event in stream:
            yield event.delta if event.type == "response.output_text.delta" else ""


READERS = pytest.mark.parametrize(
    "read", [read_chat, read_completion, read_messages, read_response]
)


@READERS
def test_the_sdk_reads_a_stream(stage: Stage, key: str, read: Reader) -> None:
    assert "".join(read(stage, key)) == "hello world"


@READERS
def test_a_client_that_hangs_up_stops_the_engine_and_loses_nothing_it_was_shown(
    stage: Stage, key: str, read: Reader
) -> None:
    stage.sglang.script = lambda request: TALKATIVE
    shown = ""
    with closing(read(stage, key)) as texts:
        while len(shown) < 20:
            shown += next(texts)
    (request,) = stage.sglang.requests
    (interaction,) = stage.await_journaled(key)
    assert stage.sglang.aborted == [request["rid"]]
    assert interaction.finish_reason == "abort"
    assert interaction.reply["content"].startswith(shown)
    assert len(interaction.reply["content"]) < MUCH_CHARS


@READERS
def test_a_stream_lost_while_it_speaks_ends_with_an_error(stage: Stage, read: Reader) -> None:
    faults = iter(["late_hang_up:1"])
    odd = [("1.1", 0, 5)]  # not what the relay says: nobody can go on from such tokens
    stage.sglang.script = lambda request: Script(fault=next(faults, ""), versions=odd)
    _, key = stage.open_session(TicketRef(1, 0))
    with pytest.raises((APIError, APIStatusError), match="lost"):
        [*read(stage, key)]
    assert stage.end_session(key) == 0
