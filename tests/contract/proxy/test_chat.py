"""The chat dialect works for the openai SDK, raw HTTP, and replies that a client began."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.session.message_matching import UNANSWERED_CALL, UNKNOWN_CALL
from areal_hpc.session.tree import unpack_ids
from tests.contract.proxy.talk import QUESTION, counted, ignored, turn
from tests.support.chatml import CHATML, write_model_dir
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script


def test_the_openai_sdk_talks_to_the_proxy(stage: Stage) -> None:
    _, key = stage.open_session(temperature=0.5, max_new_tokens=33)
    with stage.client(key) as client:
        completion = client.chat.completions.create(model="any", messages=QUESTION)
        models = client.models.list().data
    assert completion.choices[0].message.content == "hello world"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model == "tiny"
    assert completion.id.startswith("chatcmpl-")
    (request,) = stage.sglang.requests
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(request["input_ids"])
    assert request["sampling_params"]["temperature"] == 0.5
    assert request["sampling_params"]["max_new_tokens"] == 33
    assert request["return_logprob"] is True
    assert [model.id for model in models] == ["tiny"]


def test_a_multi_turn_conversation_sends_the_models_own_tokens_back(stage: Stage, key: str) -> None:
    letters = stage.speak_in_letters()
    reply = stage.chat(key, QUESTION).json()["choices"][0]["message"]["content"]
    stage.chat(key, [*QUESTION, *turn(reply)])
    stage.assert_continued(letters)
    before, after = (request["input_ids"] for request in stage.sglang.requests)
    rest = stage.tokenizer.decode(after[len(before) + len(letters) :], skip_special_tokens=False)
    assert rest == "<|im_end|>\n<|im_start|>user\nand 1?<|im_end|>\n<|im_start|>assistant\n"


def test_sampling_parameters_reach_the_model(stage: Stage, key: str) -> None:
    options: dict[str, Any] = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "stop_token_ids": [5],
    }
    answer = stage.chat(
        key, QUESTION, **options, stop="END", max_completion_tokens=9, seed=11, user="u",
        metadata={"a": "b"}, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    params = stage.sglang.requests[0]["sampling_params"]
    assert params == {**options, "stop": ["END"], "max_new_tokens": 9, "sampling_seed": 11}
    (first, *_) = answer.json()["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"]) == ("hell", -0.5)
    assert bytes(first["bytes"]) == b"hell"
    assert len(first["top_logprobs"]) == 2


def test_seeds_differ_between_calls_and_repeat_with_the_runs_seed(stage: Stage) -> None:
    def seeds(episode: int) -> list[int]:
        _, key = stage.open_session(episode=episode)
        stage.sglang.requests.clear()
        stage.ask(key, "a")
        stage.ask(key, "b")
        return [r["sampling_params"]["sampling_seed"] for r in stage.sglang.requests]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 4


def test_n_choices_are_n_interactions_that_can_each_be_continued(stage: Stage, key: str) -> None:
    texts = iter(["one", "two", "three"])
    stage.sglang.script = lambda request: Script(next(texts))
    answer = stage.chat(key, QUESTION, n=3).json()
    replies = [choice["message"]["content"] for choice in answer["choices"]]
    assert sorted(replies) == ["one", "three", "two"]
    assert len({r["sampling_params"]["sampling_seed"] for r in stage.sglang.requests}) == 3
    stage.sglang.script = lambda request: Script()
    for text in replies:
        stage.chat(key, [*QUESTION, *turn(text)])
        assert text in stage.prompt_of(stage.sglang.requests[-1])
    assert stage.end_session(key) == 6


def test_an_oversized_body_is_refused_before_it_is_read(stage: Stage, key: str) -> None:
    assert stage.ask(key, "x" * 200_000).status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(300):
            yield b" " * 1000

    answer = stage.http.post(
        f"{stage.url}/v1/chat/completions", content=chunks(), headers={"x-api-key": key}
    )
    assert answer.status_code == 413


def test_wrong_keys_open_nothing(stage: Stage, key: str) -> None:
    for wrong in ("sk-", "sk-guess", key + "x", stage.admin_key):
        answer = stage.chat(wrong, QUESTION)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    for route in ("/rl/start_session", "/rl/finish_ticket", "/rl/seal"):
        assert stage.post(route, {}, key).status_code == 401


def test_a_websocket_is_refused_so_that_clients_fall_back_at_once(stage: Stage) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    refused = stage.http.get(f"{stage.url}/v1/responses", headers=headers)
    assert (refused.status_code, refused.headers["upgrade"]) == (426, "HTTP/1.1")
    assert "takes POST" in refused.json()["error"]["message"]
    assert "pip install" not in stage.log


def test_the_routes_describe_themselves(stage: Stage) -> None:
    described = stage.http.get(f"{stage.url}/openapi.json").json()
    assert described["openapi"].startswith("3.")
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            answer = stage.http.request(method, f"{stage.url}{path}")
            is_open = {} in operation.get("security", [{}])
            assert answer.status_code == (200 if is_open else 401), path
    for prefix in ("", "/v1"):
        assert f"{prefix}/messages" in described["paths"]


def test_what_a_client_does_to_its_history_is_counted(stage: Stage, key: str) -> None:
    names = ['prompts_total{reuse="none"}', 'prompts_total{reuse="reused"}']
    names += ['rewritten_histories_total{reason="content"}', 'prompts_total{reuse="retokenized"}']
    before = [counted(stage, name) for name in names]
    stage.chat(key, QUESTION)
    stage.chat(key, [*QUESTION, *turn("hello world")])
    stage.chat(key, [*QUESTION, *turn("something else")])
    more = [counted(stage, name) - count for name, count in zip(names, before, strict=True)]
    assert more == [2, 1, 1, 0]


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def test_lone_results_and_calls_are_answered_and_counted(stage: Stage, key: str) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "7", "tool_call_id": "other"}
    before = ignored(stage)
    assert stage.chat(key, [*QUESTION, calls, result]).status_code == 200
    for name in (UNKNOWN_CALL, UNANSWERED_CALL):
        parameter = ("/chat/completions", name)
        assert ignored(stage)[parameter] == before.get(parameter, 0) + 1
    (interaction,) = stage.journaled(key)
    assert {UNKNOWN_CALL, UNANSWERED_CALL} <= {*interaction.ignored}
    assert f"{UNKNOWN_CALL!r} has no effect here" in stage.log


BEGUN = [*QUESTION, {"role": "assistant", "content": "It is"}]
ASKED: dict[str, dict[str, Any]] = {
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
    "prefix": {"messages": [*QUESTION, {**BEGUN[1], "prefix": True}]},
    "messages": {},
}
OPENING = "<|im_start|>assistant\nIt is"


def ask(stage: Stage, key: str, way: str, **more: Any) -> str:
    """Return the model's text for a reply that the client began, in one of the forms."""
    route = "/messages" if way == "messages" else "/chat/completions"
    answer = stage.post(route, {"messages": BEGUN, **ASKED[way], **more}, key)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    text: str = (
        body["content"][0]["text"]
        if way == "messages"
        else body["choices"][0]["message"]["content"]
    )
    return text


@pytest.mark.parametrize("way", ASKED)
def test_the_model_goes_on_from_the_text_and_says_only_the_rest(stage: Stage, way: str) -> None:
    letters = stage.speak_in_letters(" seven")
    _, key = stage.open_session()
    assert ask(stage, key, way) == " seven"
    (request,) = stage.sglang.requests
    assert stage.prompt_of(request).endswith(f"3 + 4?<|im_end|>\n{OPENING}")
    stage.chat(key, [*QUESTION, *turn("It is seven")])
    stage.assert_continued(letters)
    (first, _) = stage.journaled(key)
    assert first.reply["content"] == "It is seven"
    assert unpack_ids(first.output_ids).tolist() == letters


def test_a_reply_is_begun_in_the_middle_of_a_recorded_conversation(stage: Stage, key: str) -> None:
    letters = stage.speak_in_letters(" seven")
    stage.chat(key, QUESTION)
    history = [*QUESTION, *turn(" seven"), {"role": "assistant", "content": "It is"}]
    assert ask(stage, key, "messages", messages=history) == " seven"
    stage.assert_continued(letters)
    assert stage.prompt_of(stage.sglang.requests[-1]).endswith(OPENING)


def test_an_assistants_message_that_is_not_continued_is_a_turn(stage: Stage, key: str) -> None:
    assert stage.chat(key, BEGUN).status_code == 200
    (request,) = stage.sglang.requests
    assert stage.prompt_of(request).endswith("It is<|im_end|>\n<|im_start|>assistant\n")


def test_what_the_template_prints_before_a_reply_precedes_its_beginning(tmp_path: Path) -> None:
    reasoning = "<think>\n\n</think>\n\n"
    shown = f"('{reasoning}' if loop.last and message.role == 'assistant' else '')"
    template = CHATML.replace("+ message.content", f"+ {shown} + message.content")
    model_dir = write_model_dir(tmp_path / "model", template=template)
    with closing(Stage(tmp_path, model_dir=model_dir)) as stage:
        ask(stage, stage.open_session()[1], "prefix")
        prompt = stage.prompt_of(stage.sglang.requests[-1])
        assert prompt.endswith(f"assistant\n{reasoning}It is")


def test_a_template_that_hides_where_a_reply_begins_is_refused(tmp_path: Path) -> None:
    shown = "(message.content | upper if message.role == 'assistant' else message.content) +"
    template = CHATML.replace("message.content +", shown)
    model_dir = write_model_dir(tmp_path / "model", template=template)
    with closing(Stage(tmp_path, model_dir=model_dir)) as stage:
        answer = stage.post("/messages", {"messages": BEGUN}, stage.open_session()[1])
    assert answer.status_code == 400
    assert "does not show where a reply's text begins" in answer.json()["error"]["message"]
