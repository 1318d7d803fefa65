"""A client records in its own process what the proxy would record, and exports it as tensors."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionUserMessageParam
from transformers import PreTrainedTokenizerFast

from areal_hpc.client.areal_openai import ArealOpenAI
from areal_hpc.client.engine import EngineEndpoint
from areal_hpc.errors import InvalidRewardError, RecipeError
from areal_hpc.wire.proxy import EngineAddress
from tests.support.chatml import CHATML, byte_level_tokenizer, write_model_dir
from tests.support.scripted_sglang import Script, ScriptedSGLang

HI: ChatCompletionUserMessageParam = {"role": "user", "content": "hi"}
AGAIN: ChatCompletionUserMessageParam = {"role": "user", "content": "again"}
OTHER: ChatCompletionMessageParam = {"role": "system", "content": "You are another agent."}
Body = Callable[[ArealOpenAI], Coroutine[Any, Any, None]]


def fast_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), eos_token="<|im_end|>", chat_template=CHATML
    )


def with_client(
    body: Body,
    script: Callable[[dict[str, Any]], Script] = lambda request: Script(versions=None),
    **options: Any,
) -> list[dict[str, Any]]:
    """Run `body` with a client of a scripted server; what the server was asked."""

    async def run() -> list[dict[str, Any]]:
        server = ScriptedSGLang(byte_level_tokenizer(), script)
        await server.start()
        client = ArealOpenAI(server.url, options.pop("tokenizer", fast_tokenizer()), **options)
        try:
            await body(client)
        finally:
            await client.close()
            await server.stop()
        return server.requests

    return asyncio.run(asyncio.wait_for(run(), 30))


async def two_turns(client: ArealOpenAI) -> tuple[str, str]:
    """Ids of the first and the second completion."""
    first = await client.chat.completions.create(model="m", messages=[HI])
    history: list[Any] = [HI, first.choices[0].message, AGAIN]
    second = await client.chat.completions.create(model="m", messages=history)
    return first.id, second.id


def test_responses_are_recorded_like_completions() -> None:
    async def body(client: ArealOpenAI) -> None:
        first = await client.responses.create(model="m", input="hi")
        history: Any = [HI, *(item.to_dict() for item in first.output), AGAIN]
        second = await client.responses.create(model="m", input=history)
        client.set_reward(second.id, 1.0)
        exported = client.export_interactions(style="concat")
        assert list(exported) == [second.id]
        assert exported[second.id].reward == 1.0
        assert [one.reuse for one in client.tree] == ["none", "reused"]

    with_client(body, chat_template_type="concat")


@pytest.mark.parametrize("source", ["transformers", "directory"])
def test_the_second_turn_reads_what_the_first_one_said(source: str, tmp_path: Path) -> None:
    async def body(client: ArealOpenAI) -> None:
        first, second = await two_turns(client)
        assert [one.interaction_id for one in client.tree] == [first, second]
        assert [one.reuse for one in client.tree] == ["none", "reused"]

    tokenizer = fast_tokenizer() if source == "transformers" else write_model_dir(tmp_path / "m")
    letters = [token for text in "hello" for token in byte_level_tokenizer().encode(text).ids]
    requests = with_client(
        body, lambda request: Script("hello", output_ids=letters), tokenizer=tokenizer
    )
    first, second = (request["input_ids"] for request in requests)
    said = len(first)
    assert second[:said] == first
    assert second[said : said + len(letters)] == letters


def test_an_id_that_the_tokenizer_lacks_is_recorded() -> None:
    # Embeddings are padded beyond the tokenizer's ids, and a model may sample such an id.
    padded = len(fast_tokenizer()) + 5

    async def body(client: ArealOpenAI) -> None:
        answer = await client.chat.completions.create(model="m", messages=[HI])
        client.set_reward(answer.id, 1.0)
        row = client.export_interactions("individual")[answer.id]
        assert row.model_response.output_tokens[:2] == [104, padded]

    with_client(body, lambda request: Script(versions=None, output_ids=[104, padded]))


def test_rewards_pass_back_to_earlier_turns_and_agents() -> None:
    async def body(client: ArealOpenAI) -> None:
        first, second = await two_turns(client)
        other = await client.chat.completions.create(model="m", messages=[OTHER, HI])
        client.set_reward(first, 1)
        client.set_reward(first, True)
        client.set_final_reward(np.float32(2.0))  # type: ignore[arg-type]  # any number will do
        earned = client.apply_reward_discount(turn_discount=0.5)
        assert earned == {first: 1.5, second: 1.0, other.id: 2.0}
        with pytest.raises(RuntimeError, match="only be called once"):
            client.apply_reward_discount()
        exported = client.export_interactions("individual")
        assert {name: one.reward for name, one in exported.items()} == earned
        assert exported[other.id].completion.id == other.id

    with_client(body)


def test_by_arrival_the_order_of_requests_alone_decides() -> None:
    async def body(client: ArealOpenAI) -> None:
        asking = [
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            for text in ("left", "right")
        ]
        await asyncio.gather(*asking)
        client.set_last_reward(1.0)
        earned = client.apply_reward_discount(0.5, "chronological").values()
        assert sorted(one or 0.0 for one in earned) == [0.5, 1.0]

    with_client(body, lambda request: Script(delay_s=0.05))


def test_wrong_rewards_are_refused() -> None:
    async def body(client: ArealOpenAI) -> None:
        with pytest.raises(RuntimeError, match="no completed interaction"):
            client.set_last_reward(1.0)
        first, second = await two_turns(client)
        with pytest.raises(KeyError, match=f"'resp-1' .* it has: {first}, {second}"):
            client.set_reward("resp-1", 1.0)
        for reward in (float("nan"), float("inf"), None):
            with pytest.raises(InvalidRewardError, match="finite"):
                client.set_last_reward(reward)  # type: ignore[arg-type]  # None is wrong, too

    with_client(body)


def test_a_failed_request_is_never_the_last_interaction() -> None:
    async def body(client: ArealOpenAI) -> None:
        good = await client.chat.completions.create(model="m", messages=[HI])
        with pytest.raises(openai.BadRequestError, match="too warm"):
            await client.chat.completions.create(model="m", messages=[HI, AGAIN])
        client.set_last_reward(1.0)
        assert client.export_interactions()[good.id].reward == 1.0
        assert len(client.tree) == 1

    faults = iter(["", "400"])
    with_client(body, lambda request: Script(fault=next(faults)))


def test_tensors_have_the_shapes_and_types_that_trainers_of_areal_expect() -> None:
    async def body(client: ArealOpenAI) -> None:
        first, second = await two_turns(client)
        client.set_last_reward(1.0)
        one = client.get_interaction(second)
        assert one is not None
        tensors = one.to_tensor_dict()
        assert one.to_tensor_dict() is tensors
        answer = one.model_response
        sizes = (len(answer.input_tokens), len(answer.output_tokens))
        length = sum(sizes)
        assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
            "input_ids": (torch.int64, (1, length)),
            "loss_mask": (torch.int64, (1, length)),
            "logprobs": (torch.float32, (1, length)),
            "versions": (torch.int64, (1, length)),
            "turn_ids": (torch.int32, (1, length)),
            "attention_mask": (torch.bool, (1, length)),
            "rewards": (torch.float32, (1,)),
            "original_rewards": (torch.float32, (1,)),
        }
        assert tensors["input_ids"][0].tolist() == answer.input_tokens + answer.output_tokens
        assert tensors["loss_mask"][0].tolist() == [0] * sizes[0] + [1] * sizes[1]
        assert tensors["turn_ids"][0].tolist() == [-1] * sizes[0] + [0] * sizes[1]
        assert tensors["versions"][0].tolist() == [-1] * sizes[0] + answer.output_versions
        assert torch.allclose(
            tensors["logprobs"][0], torch.tensor([0.0] * sizes[0] + answer.output_logprobs)
        )
        assert tensors["rewards"].tolist() == [1.0]
        assert client.export_interactions()[first].to_tensor_dict()["rewards"].tolist() == [0.0]
        assert client.get_interaction("chatcmpl-unknown") is None
        assert [message["role"] for message in one.messages] == ["user", "assistant", "user"]

    with_client(body)


def test_concat_gives_a_row_per_leaf_and_trains_each_reply_once() -> None:
    async def body(client: ArealOpenAI) -> None:
        first, second = await two_turns(client)
        reply: ChatCompletionMessageParam = {"role": "assistant", "content": "hello world"}
        third = await client.chat.completions.create(
            model="m", messages=[HI, reply, {"role": "user", "content": "else"}]
        )
        client.set_reward(second, 1.0)
        client.set_reward(third.id, 0.0)
        exported = client.export_interactions("concat", reward_discount=0.5)
        assert [(name, one.reward) for name, one in exported.items()] == [
            (second, 1.0),
            (third.id, 0.0),
        ]
        left, right = (one.to_tensor_dict() for one in exported.values())
        assert sorted(set(left["turn_ids"][0].tolist())) == [-1, 0, 1]
        assert sorted(set(right["turn_ids"][0].tolist())) == [-1, 0]
        said = sum(one.output_tokens for one in client.tree)
        assert left["loss_mask"].sum() + right["loss_mask"].sum() == said
        assert set(client.export_interactions("individual")) == {first, second, third.id}

    with_client(body, chat_template_type="concat")


def test_an_unused_reply_to_a_repeated_request_can_be_dropped() -> None:
    async def body(client: ArealOpenAI) -> None:
        lost = await client.chat.completions.create(model="m", messages=[HI])
        _, last = await two_turns(client)
        client.set_reward(last, 1.0)
        kept = client.export_interactions(reward_discount=1.0, drop_retry_orphans=True)
        assert lost.id not in kept
        assert [one.reward for one in kept.values()] == [1.0, 1.0]
        assert lost.id in client.export_interactions()

    with_client(body)


def test_what_cannot_be_exported_is_refused() -> None:
    async def body(client: ArealOpenAI) -> None:
        assert client.export_interactions() == {}
        with pytest.raises(ValueError, match="Cannot export interactions in 'concat' style"):
            client.export_interactions("concat")
        with pytest.raises(ValueError, match="Invalid export interactions style tree"):
            client.export_interactions("tree")  # type: ignore[arg-type]

    with_client(body)
    with pytest.raises(ValueError, match="chat_template_type"):
        ArealOpenAI("http://nowhere", fast_tokenizer(), chat_template_type="hg")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="expected a fast tokenizer"):
        ArealOpenAI("http://nowhere", byte_level_tokenizer())


def test_streams_and_length_limits_are_those_of_the_proxy() -> None:
    async def body(client: ArealOpenAI) -> None:
        stream = await client.chat.completions.create(model="m", messages=[HI], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "hello world"
        assert len(client.tree) == 1
        await client.chat.completions.create(model="m", messages=[HI], max_tokens=65)
        long: ChatCompletionMessageParam = {"role": "user", "content": "hi " * 64}
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens"):
            await client.chat.completions.create(model="m", messages=[long])

    requests = with_client(body, engine_max_tokens=64)
    assert requests[1]["sampling_params"]["max_new_tokens"] == 64 - len(requests[1]["input_ids"])


def test_clients_of_one_engine_share_its_connections_but_nothing_else() -> None:
    async def run() -> None:
        server = ScriptedSGLang(byte_level_tokenizer())
        await server.start()
        engine = EngineEndpoint(server.url)
        clients = [ArealOpenAI(engine, fast_tokenizer()) for _ in range(3)]
        try:
            await asyncio.gather(*(two_turns(client) for client in clients))
            assert [len(client.tree) for client in clients] == [2, 2, 2]
            exported = [set(client.export_interactions()) for client in clients]
            assert len(set.union(*exported)) == 6
        finally:
            for client in clients:
                await client.close()
            await engine.close()
            await server.stop()

    asyncio.run(run())


def test_an_engine_may_want_a_key() -> None:
    async def run() -> None:
        server = ScriptedSGLang(byte_level_tokenizer())
        await server.start()
        client = ArealOpenAI(EngineAddress(server.url, "sk-engine"), fast_tokenizer())
        await client.chat.completions.create(model="m", messages=[HI])
        await client.close()
        await server.stop()
        assert server.keys == ["Bearer sk-engine"]

    asyncio.run(run())
