"""What agents see of the chat dialect: the openai SDK and raw HTTP against a real proxy."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletionMessageParam

from areal_hpc.wire.ledger import TicketRef
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 3 + 4?"}]


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


def test_a_multi_turn_conversation_sends_the_models_own_tokens_back(stage: Stage) -> None:
    letters = stage.speak_in_letters()
    _, key = stage.open_session()
    first = stage.chat(key, QUESTION).json()["choices"][0]["message"]
    stage.chat(key, [*QUESTION, first, {"role": "user", "content": "and 1?"}])
    stage.assert_continued(letters)
    before, after = (request["input_ids"] for request in stage.sglang.requests)
    rest = stage.tokenizer.decode(after[len(before) + len(letters) :], skip_special_tokens=False)
    assert rest == "<|im_end|>\n<|im_start|>user\nand 1?<|im_end|>\n<|im_start|>assistant\n"


def test_sampling_parameters_reach_the_model(stage: Stage) -> None:
    _, key = stage.open_session()
    asked: dict[str, Any] = {
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
        key, QUESTION, **asked, stop="END", max_completion_tokens=9, seed=11, user="u",
        metadata={"a": "b"}, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    sent = stage.sglang.requests[0]["sampling_params"]
    assert sent == {**asked, "stop": ["END"], "max_new_tokens": 9, "sampling_seed": 11}
    (first, *_) = answer.json()["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"]) == ("hell", -0.5)
    assert bytes(first["bytes"]) == b"hell"
    assert len(first["top_logprobs"]) == 2


def test_seeds_differ_between_calls_and_episodes_but_repeat_with_the_runs_seed(
    stage: Stage,
) -> None:
    def seeds(episode: int) -> list[int]:
        _, key = stage.open_session(episode=episode)
        stage.sglang.requests.clear()
        stage.ask(key, "a")
        stage.ask(key, "b")
        return [r["sampling_params"]["sampling_seed"] for r in stage.sglang.requests]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 4


def test_n_choices_are_n_interactions_that_can_each_be_continued(stage: Stage) -> None:
    texts = iter(["one", "two", "three"])
    stage.sglang.script = lambda request: Script(next(texts))
    _, key = stage.open_session()
    answer = stage.chat(key, QUESTION, n=3).json()
    said = [choice["message"]["content"] for choice in answer["choices"]]
    assert sorted(said) == ["one", "three", "two"]
    assert len({r["sampling_params"]["sampling_seed"] for r in stage.sglang.requests}) == 3
    stage.sglang.script = lambda request: Script()
    for text in said:
        stage.chat(
            key,
            [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "b"}],
        )
        sent = stage.tokenizer.decode(stage.sglang.requests[-1]["input_ids"])
        assert text in sent
    ended = stage.post("/rl/end_session", {}, key).json()
    assert ended["interaction_count"] == 6


def test_a_stop_string_or_a_bare_end_of_turn_is_an_ordinary_reply(stage: Stage) -> None:
    _, key = stage.open_session()
    stage.sglang.script = lambda request: Script("3 + 4 STOP", finish="stop:STOP")
    choice = stage.chat(key, QUESTION, stop=["STOP"]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("3 + 4 ", "stop")
    stage.sglang.script = lambda request: Script("")
    choice = stage.chat(key, QUESTION).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": QUESTION, "temperature": -1}, "temperature"),
        ({"messages": QUESTION, "temperature": "hot"}, "temperature"),
        ({"messages": QUESTION, "top_p": 0}, "top_p"),
        ({"messages": QUESTION, "n": 0}, "n"),
        ({"messages": QUESTION, "max_tokens": 0}, "max_tokens"),
        ({"messages": QUESTION, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": QUESTION, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": QUESTION, "stop_token_ids": [512]}, "stop_token_ids"),
        ({"messages": QUESTION, "logit_bias": {"512": 1}}, "logit_bias"),
        ({"messages": QUESTION, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": QUESTION, "logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"messages": QUESTION, "functions": []}, "functions"),
        ({"messages": QUESTION, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": QUESTION, "tools": [TOOL]}, "tools"),
        ({"messages": QUESTION, "tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": QUESTION, "tool_choice": "required"}, "tool_choice"),
        ({"messages": QUESTION, "response_format": {"type": "poem"}}, "response_format.type"),
        (
            {"messages": QUESTION, "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        (
            {"messages": QUESTION, "regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"messages": QUESTION, "modalities": ["text", "audio"]}, "modalities[1]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(
    stage: Stage, body: dict[str, Any], param: str
) -> None:
    _, key = stage.open_session()
    answer = stage.post("/v1/chat/completions", body, key)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert stage.sglang.requests == []


def test_a_body_that_is_not_json_is_the_requests_fault(stage: Stage) -> None:
    _, key = stage.open_session()
    for body in (b"{", b"\xff\xfe", b""):
        answer = stage.http.post(
            f"{stage.url}/v1/chat/completions", content=body, headers={"x-api-key": key}
        )
        assert answer.status_code == 400, answer.text


def test_the_sdk_names_the_parameter_at_fault(stage: Stage) -> None:
    _, key = stage.open_session()
    with stage.client(key) as client, pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=QUESTION, logit_bias={"512": 1})
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": QUESTION, "max_tokens": 2040}),
        ("chat/completions", {"messages": QUESTION, "max_completion_tokens": 2048}),
        ("completions", {"prompt": "hi", "max_tokens": 2048}),
        ("messages", {"messages": QUESTION, "max_tokens": 32000}),
        ("responses", {"input": "hi", "max_output_tokens": 2048}),
        ("chat/completions", {"messages": QUESTION}),
    ],
)
def test_a_limit_beyond_the_context_is_the_room_that_is_left(
    stage: Stage, route: str, body: dict[str, Any]
) -> None:
    _, key = stage.open_session(max_new_tokens=2048)
    answer = stage.post(f"/v1/{route}", body, key)
    assert answer.status_code == 200, answer.text
    (request,) = stage.sglang.requests
    assert request["sampling_params"]["max_new_tokens"] == 2048 - len(request["input_ids"])


def test_an_oversized_body_is_refused_before_it_is_read(stage: Stage) -> None:
    _, key = stage.open_session()
    assert stage.ask(key, "x" * 200_000).status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(300):
            yield b" " * 1000

    answer = stage.http.post(
        f"{stage.url}/v1/chat/completions", content=chunks(), headers={"x-api-key": key}
    )
    assert answer.status_code == 413


def test_wrong_keys_open_nothing(stage: Stage) -> None:
    _, key = stage.open_session()
    for wrong in ("sk-", "sk-guess", key + "x", stage.admin_key):
        answer = stage.http.post(
            f"{stage.url}/v1/chat/completions",
            json={"messages": QUESTION},
            headers={"authorization": f"Bearer {wrong}"},
        )
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    for route in ("/rl/start_session", "/rl/finish_ticket", "/rl/seal"):
        assert stage.post(route, {}, key).status_code == 401


def test_a_wrong_key_is_refused_before_the_body_is_sent(stage: Stage) -> None:
    host, port = stage.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: proxy\r\n"
            b"Authorization: Bearer sk-guess\r\nContent-Length: 90000\r\n\r\n"
        )
        assert connection.recv(64).startswith(b"HTTP/1.1 401")


def test_unknown_routes_and_methods_have_their_statuses(stage: Stage) -> None:
    assert stage.http.get(f"{stage.url}/v1/nothing").status_code == 404
    refused = stage.http.get(f"{stage.url}/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_a_websocket_is_refused_so_that_clients_fall_back_at_once(stage: Stage) -> None:
    asked = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    refused = stage.http.get(f"{stage.url}/v1/responses", headers=asked)
    assert (refused.status_code, refused.headers["upgrade"]) == (426, "HTTP/1.1")
    assert "takes POST" in refused.json()["error"]["message"]
    assert "pip install" not in stage.log


def test_the_routes_describe_themselves(stage: Stage) -> None:
    described = stage.http.get(f"{stage.url}/openapi.json").json()
    assert described["openapi"].startswith("3.")
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            answer = stage.http.request(method, f"{stage.url}{path}")
            assert answer.status_code == (401 if "security" in operation else 200), path
    for prefix in ("", "/v1"):
        assert f"{prefix}/messages" in described["paths"]


def test_a_token_outside_the_vocabulary_never_reaches_the_engine(own_stage: Stage) -> None:
    own_stage.stop_proxy()
    (own_stage.model_dir / "config.json").write_text('{"vocab_size": 300}')
    own_stage.start_proxy()
    _, key = own_stage.open_session()
    answer = own_stage.ask(key, "hello")  # merged tokens have the highest ids
    assert answer.status_code == 400
    assert "vocabulary of 300" in answer.json()["error"]["message"]
    assert own_stage.sglang.requests == []


def test_concurrent_sessions_never_mix(stage: Stage) -> None:
    async def talk(number: int) -> tuple[str, list[str | None]]:
        session_id, key = stage.open_session(TicketRef(1000 + number, 0))
        said = []
        async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key) as client:
            messages: list[ChatCompletionMessageParam]
            messages = [{"role": "user", "content": f"session {number} "}]
            for turn in range(4):
                completion = await client.chat.completions.create(model="m", messages=messages)
                said.append(completion.choices[0].message.content)
                messages += [
                    {"role": "assistant", "content": said[-1]},
                    {"role": "user", "content": f"turn {turn}"},
                ]
        return session_id, said

    def script(request: dict[str, Any]) -> Script:
        text = stage.tokenizer.decode(request["input_ids"])
        number = text.split("session ")[1].split(" ")[0]
        return Script(f"to {number}", delay_s=0.002 * (int(number) % 3))

    async def everyone() -> list[tuple[str, list[str | None]]]:
        return await asyncio.gather(*(talk(number) for number in range(12)))

    stage.sglang.script = script
    for number, (_, said) in enumerate(asyncio.run(everyone())):
        assert said == [f"to {number}"] * 4
    for request in stage.sglang.requests:
        text = stage.tokenizer.decode(request["input_ids"])
        assert text.count("session ") == 1


def test_a_hung_up_client_frees_the_engine(stage: Stage) -> None:
    gate = threading.Event()
    stage.sglang.script = lambda request: Script(gate=gate)
    _, key = stage.open_session()

    async def ask_and_leave() -> None:
        async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key) as client:
            asked = asyncio.ensure_future(
                client.chat.completions.create(model="m", messages=QUESTION)
            )
            while not stage.sglang.requests:
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.wait({asked})
            while not stage.sglang.aborted:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(ask_and_leave(), 60))
    gate.set()
    assert stage.sglang.aborted == [stage.sglang.requests[0]["rid"]]
    assert stage.post("/rl/end_session", {}, key).json()["interaction_count"] == 0


def test_what_a_client_does_to_its_history_is_counted(stage: Stage) -> None:
    def counted(name: str) -> int:
        lines = stage.http.get(f"{stage.url}/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return int(float(values.get(f"areal_hpc_proxy_{name}", 0)))

    names = ['prompts_total{reuse="none"}', 'prompts_total{reuse="reused"}']
    names += ['rewritten_histories_total{reason="content"}', 'prompts_total{reuse="retokenized"}']
    before = [counted(name) for name in names]
    _, key = stage.open_session()
    first = stage.chat(key, QUESTION).json()["choices"][0]["message"]
    then = {"role": "user", "content": "and 1?"}
    stage.chat(key, [*QUESTION, first, then])
    stage.chat(key, [*QUESTION, {**first, "content": "something else"}, then])
    assert [counted(name) - count for name, count in zip(names, before, strict=True)] == [
        2,
        1,
        1,
        0,
    ]


def test_a_fault_in_a_later_message_is_named_by_its_place_in_the_whole(stage: Stage) -> None:
    _, key = stage.open_session()
    history = [{"role": "user", "content": "hi"}]
    assert stage.chat(key, history).status_code == 200
    picture = {"role": "user", "content": [{"type": "image_url"}]}
    reply = {"role": "assistant", "content": "hello world"}
    answer = stage.chat(key, [*history, reply, picture])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[2].content[0].type"
    assert stage.chat(key, [*history, reply, *history]).status_code == 200
    first, second = stage.sglang.requests
    assert second["input_ids"][: len(first["input_ids"])] == first["input_ids"]
