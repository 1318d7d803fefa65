"""Anthropic's dialect works for the anthropic SDK and raw HTTP against a real proxy."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
from anthropic.types import TextBlock

from tests.contract.proxy.talk import QUESTION, turn
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script


def ask(
    stage: Stage, key: str, messages: Sequence[Mapping[str, object]] = QUESTION, **more: Any
) -> httpx.Response:
    return stage.post("/v1/messages", {"messages": messages, "max_tokens": 64, **more}, key)


def test_the_anthropic_sdk_talks_to_the_proxy(stage: Stage) -> None:
    _, key = stage.open_session(temperature=0.5)
    with stage.anthropic(key) as client:
        message = client.messages.create(
            model="any",
            max_tokens=33,
            system="Be brief.",
            messages=QUESTION,
            extra_body={"top_k": 7, "top_p": 0.5},
        )
        (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    (block,) = message.content
    assert isinstance(block, TextBlock)
    assert block.text == "hello world"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.role, message.model) == ("assistant", "tiny")
    (request,) = stage.sglang.requests
    params = request["sampling_params"]
    names = ("temperature", "max_new_tokens", "top_k", "top_p")
    assert [params[name] for name in names] == [0.5, 33, 7, 0.5]
    assert message.usage.input_tokens == len(request["input_ids"])
    assert stage.prompt_of(request).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>"
    )


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(
    ("script", "end", "stop"),
    [
        (Script(), "end_turn", None),
        (Script("hello worldSTOP", finish="stop:STOP"), "stop_sequence", "STOP"),
        (Script("hello world", finish="length"), "max_tokens", None),
    ],
    ids=["end of turn", "stop sequence", "full"],
)
def test_a_stream_tells_the_same_message_as_a_whole_reply(
    stage: Stage, key: str, script: Script, end: str, stop: str | None
) -> None:
    stage.sglang.script = lambda request: script
    request: Any = {"model": "m", "max_tokens": 64, "messages": QUESTION}
    request["stop_sequences"] = ["STOP", "HALT"]
    with stage.anthropic(key) as client:
        full = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            assert sum(event.type == "content_block_delta" for event in stream) > 3
            streamed = stream.get_final_message()
    assert streamed.id != full.id
    stream_dict, full_dict = (message.to_dict(exclude_unset=False) for message in (streamed, full))
    assert {**stream_dict, "id": ""} == {**full_dict, "id": ""}
    assert [block.to_dict() for block in full.content] == [{"type": "text", "text": "hello world"}]
    assert (full.stop_reason, full.stop_sequence) == (end, stop)
    assert stage.sglang.requests[-1]["sampling_params"]["stop"] == ["STOP", "HALT"]
    assert [entry.reply["content"] for entry in stage.journaled(key)] == ["hello world"] * 2


def test_a_conversation_sends_back_the_models_own_tokens(stage: Stage, key: str) -> None:
    letters = stage.speak_in_letters()
    hints: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    header = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};"
    for number in range(3):
        system = [
            {"type": "text", "text": header.format(number, number)},
            {"type": "text", "text": "You help.", **(hints if number == 1 else {})},
        ]
        history: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": "one", **hints}]},
            {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": [{"type": "text", "text": "three"}]},
        ]
        messages = history[: 2 * number + 1]
        answer = ask(stage, key, messages, system=system, metadata={"user_id": f"u{number}"})
        assert answer.status_code == 200, answer.text
    stage.assert_continued(letters)
    assert "billing" not in stage.prompt_of(stage.sglang.requests[0])


def test_a_users_normalizer_lets_conversations_go_on(small_stage: Stage, small_key: str) -> None:
    messages = [*QUESTION, *turn("hello world")]
    for count in (1, 3):
        system = f"You help. It is {count} o'clock."
        assert ask(small_stage, small_key, messages[:count], system=system).status_code == 200
    before, after = (request["input_ids"] for request in small_stage.sglang.requests)
    assert after[: len(before)] == before
    assert "o'clock" not in small_stage.prompt_of(small_stage.sglang.requests[1])


def test_tokens_are_counted_as_the_model_would_read_them(stage: Stage, key: str) -> None:
    body = {"messages": QUESTION, "model": "m", "system": "Be brief."}
    counted = stage.post("/v1/messages/count_tokens", body, key).json()["input_tokens"]
    ask(stage, key, system="Be brief.")
    assert counted == len(stage.sglang.requests[0]["input_ids"])
    with stage.anthropic(key) as client:
        again = client.messages.count_tokens(model="m", messages=QUESTION, system="Be brief.")
    assert again.input_tokens == counted
    assert stage.end_session(key) == 1


def test_results_of_tools_are_messages_of_their_own(stage: Stage, key: str) -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "7"},
        {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3", "content": [{"type": "text", "text": "x"}]},
    ]
    uses = [{"type": "tool_use", "id": f"t{i}", "name": "add", "input": {}} for i in (1, 2, 3)]
    history = [
        *QUESTION,
        {"role": "assistant", "content": uses},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    assert ask(stage, key, history).status_code == 200
    _, tail = stage.prompt_of(stage.sglang.requests[0]).split("assistant\n<|im_end|>\n")
    assert tail == (
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>tool\nError: <|im_end|>\n"
        "<|im_start|>tool\nx<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("route", ["/v1/messages", "/messages/count_tokens"])
def test_every_error_has_anthropics_shape(stage: Stage, key: str, route: str) -> None:
    def refused(expected: int, **request: Any) -> str:
        answer = stage.http.request(**{"method": "POST", "url": f"{stage.url}{route}", **request})
        assert answer.status_code == expected, answer.text
        assert answer.json()["type"] == "error"
        return str(answer.json()["error"]["type"])

    keyed: dict[str, Any] = {"headers": {"x-api-key": key}}
    assert refused(401, headers={"x-api-key": "sk-guess"}) == "authentication_error"
    assert refused(400, content=b"{", **keyed) == "invalid_request_error"
    assert refused(413, content=b" " * 200_000, **keyed) == "request_too_large"
    assert refused(405, method="GET") == "invalid_request_error"
    stage.end_session(key)
    body = {"messages": QUESTION}
    assert refused(403, json=body, **keyed) == "permission_error"
