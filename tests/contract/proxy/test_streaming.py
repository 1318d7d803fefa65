"""Tokens leave as the model says them; what has been shown is recorded, whatever breaks off."""

import threading
from typing import Any

import pytest

from tests.contract.proxy.talk import QUESTION, chunks_of
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import TALKATIVE, Script


def events(stage: Stage, key: str, **request: Any) -> list[dict[str, Any]]:
    return chunks_of(stage.chat(key, QUESTION, stream=True, **request))


def text_of(chunks: list[dict[str, Any]], choice: int = 0) -> str:
    return "".join(
        one["delta"].get("content") or ""
        for chunk in chunks
        for one in chunk["choices"]
        if one["index"] == choice
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
                gate.set()  # only now does it say more
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
    whole = stage.chat(key, QUESTION, logprobs=True, top_logprobs=2).json()["choices"][0]
    assert tokens == whole["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == whole["message"]["content"]


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
                assert [one.finish_reason for one in stage.journaled(key)] == ["stop"]
