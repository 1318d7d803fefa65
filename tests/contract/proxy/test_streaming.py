"""Tokens stream as the model generates them in every dialect, and the record has each of them."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import pytest
from anthropic import APIStatusError
from openai import APIError

from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.talk import LEAST, QUESTION, ask_least, chunks_of
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import MUCH_CHARS, TALKATIVE, Script


def events(stage: Stage, key: str, **request: Any) -> list[dict[str, Any]]:
    return chunks_of(stage.chat(key, QUESTION, stream=True, **request))


def text_of(chunks: list[dict[str, Any]], choice: int = 0) -> str:
    return "".join(
        part["delta"].get("content") or ""
        for chunk in chunks
        for part in chunk["choices"]
        if part["index"] == choice
    )


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("piece_tokens", [1, 3, 100])
def test_the_parts_of_a_reply_make_the_whole(stage: Stage, key: str, piece_tokens: int) -> None:
    stage.sglang.script = lambda request: Script("hello wörld 7", piece_tokens=piece_tokens)
    chunks = events(stage, key)
    assert text_of(chunks) == "hello wörld 7"
    first, *_, last = (chunk["choices"][0] for chunk in chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert stage.sglang.requests[0]["stream"] is True


def test_parts_leave_while_the_model_still_speaks(stage: Stage, key: str) -> None:
    gate = threading.Event()
    stage.sglang.script = lambda request: Script("one two three four", gate=gate)
    text = ""
    with stage.client(key) as client:
        for chunk in client.chat.completions.create(model="m", messages=QUESTION, stream=True):
            text += chunk.choices[0].delta.content or ""
            if text and not gate.is_set():
                assert len(text) < len("one two three four")
                gate.set()  # more text comes only now
    assert text == "one two three four"


def test_usage_comes_last_and_only_when_asked_for(stage: Stage, key: str) -> None:
    assert all("usage" not in chunk for chunk in events(stage, key))
    *others, last = events(stage, key, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    prompt = len(stage.sglang.requests[-1]["input_ids"])
    assert last["usage"]["prompt_tokens"] == prompt
    assert last["usage"]["total_tokens"] == prompt + last["usage"]["completion_tokens"]


def test_streamed_choices_interleave_and_each_ends_once(stage: Stage, key: str) -> None:
    texts = iter(["one one one", "two two", "three"])
    stage.sglang.script = lambda request: Script(next(texts), piece_delay_s=0.01)
    chunks = events(stage, key, n=3)
    assert sorted(text_of(chunks, i) for i in range(3)) == ["one one one", "three", "two two"]
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert stage.end_session(key) == 3


@pytest.mark.usefixtures("pieces")
def test_streamed_logprobs_are_those_of_every_token(stage: Stage, key: str) -> None:
    chunks = events(stage, key, logprobs=True, top_logprobs=2)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    tokens = [token for part in parts for token in part["content"]]
    complete = stage.chat(key, QUESTION, logprobs=True, top_logprobs=2).json()["choices"][0]
    assert tokens == complete["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == complete["message"]["content"]


@pytest.mark.usefixtures("pieces")
def test_a_stop_string_is_never_shown_not_even_its_beginning(stage: Stage, key: str) -> None:
    stage.sglang.script = lambda request: Script("3 + 4 STOP", finish="stop:STOP")
    chunks = events(stage, key, stop=["STOP", "STRANGE"])
    assert text_of(chunks) == "3 + 4 "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_what_a_client_left_is_not_the_last_completed_reply(stage: Stage, key: str) -> None:
    first = stage.chat(key, QUESTION).json()["id"]
    stage.sglang.script = lambda request: TALKATIVE
    with (
        stage.client(key) as client,
        client.chat.completions.create(model="m", messages=QUESTION, stream=True) as stream,
    ):
        next(iter(stream))
        next(iter(stream))
    stage.await_journaled(key, 2)
    assert stage.post("/rl/set_reward", {"reward": 1.0}, key).json()["interaction_id"] == first


def test_the_end_of_a_reply_comes_after_its_journal_record(stage: Stage, key: str) -> None:
    stage.sglang.script = lambda request: Script("one two", piece_delay_s=0.01)
    with stage.client(key) as client:
        for chunk in client.chat.completions.create(model="m", messages=QUESTION, stream=True):
            if chunk.choices[0].finish_reason:
                assert [entry.finish_reason for entry in stage.journaled(key)] == ["stop"]


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
        request = {"input": "and 1?", "previous_response_id": first["id"]}
        assert stage.post("/v1/responses", request, key).json()["status"] == "incomplete"
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
def test_who_hangs_up_stops_the_engine_at_no_loss(stage: Stage, key: str, read: Reader) -> None:
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
    odd = [("1.1", 0, 5)]  # not the relay's message: nobody can continue such tokens
    stage.sglang.script = lambda request: Script(fault=next(faults, ""), versions=odd)
    _, key = stage.open_session(TicketRef(1, 0))
    with pytest.raises((APIError, APIStatusError), match="lost"):
        [*read(stage, key)]
    assert stage.end_session(key) == 0
