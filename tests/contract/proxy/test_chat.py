"""What agents see of the chat dialect: the openai SDK and raw HTTP against a real proxy."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.talk import QUESTION, counted
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
    names = ['prompts_total{reuse="none"}', 'prompts_total{reuse="reused"}']
    names += ['rewritten_histories_total{reason="content"}', 'prompts_total{reuse="retokenized"}']
    before = [counted(stage, name) for name in names]
    _, key = stage.open_session()
    first = stage.chat(key, QUESTION).json()["choices"][0]["message"]
    then = {"role": "user", "content": "and 1?"}
    stage.chat(key, [*QUESTION, first, then])
    stage.chat(key, [*QUESTION, {**first, "content": "something else"}, then])
    more = [counted(stage, name) - count for name, count in zip(names, before, strict=True)]
    assert more == [2, 1, 1, 0]
