"""A client in the agent's process records as the proxy does and exports tensors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionUserMessageParam
from transformers import PreTrainedTokenizerFast

from areal_hpc.client.areal_openai import ArealOpenAI
from areal_hpc.client.in_process_engine import EngineEndpoint
from areal_hpc.errors import InvalidRewardError, RecipeError
from areal_hpc.wire.proxy import EngineAddress
from tests.support.chatml import CHATML, byte_level_tokenizer, write_model_dir
from tests.support.scripted_sglang import Script, ScriptedSGLang

HI: ChatCompletionUserMessageParam = {"role": "user", "content": "hi"}
AGAIN: ChatCompletionUserMessageParam = {"role": "user", "content": "again"}
OTHER: ChatCompletionMessageParam = {"role": "system", "content": "You are another agent."}
pytestmark = pytest.mark.asyncio


def fast_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), eos_token="<|im_end|>", chat_template=CHATML
    )


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ScriptedSGLang]:
    server = ScriptedSGLang(byte_level_tokenizer(), lambda request: Script(versions=None))
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def client_of(
    engine: str | EngineEndpoint | EngineAddress, tokenizer: Any = None, **options: Any
) -> AsyncIterator[ArealOpenAI]:
    client = ArealOpenAI(engine, tokenizer or fast_tokenizer(), **options)
    try:
        yield client
    finally:
        await client.close()


@pytest_asyncio.fixture
async def client(server: ScriptedSGLang) -> AsyncIterator[ArealOpenAI]:
    async with client_of(server.url) as client:
        yield client


async def ask(client: ArealOpenAI, *messages: ChatCompletionMessageParam) -> str:
    return (await client.chat.completions.create(model="m", messages=messages)).id


async def two_turns(client: ArealOpenAI, retries: int = 0) -> tuple[str, str]:
    """Play two turns, the first sent again if it is a retry, and return their ids."""
    sent_again = {"x-stainless-retry-count": str(retries)}
    first = await client.chat.completions.create(model="m", messages=[HI], extra_headers=sent_again)
    history: list[Any] = [HI, first.choices[0].message, AGAIN]
    return first.id, await ask(client, *history)


async def test_responses_are_recorded_like_completions(server: ScriptedSGLang) -> None:
    async with client_of(server.url, chat_template_type="concat") as client:
        first = await client.responses.create(model="m", input="hi")
        history: Any = [HI, *(item.to_dict() for item in first.output), AGAIN]
        second = await client.responses.create(model="m", input=history)
        client.set_reward(second.id, 1.0)
        exported = client.export_interactions(style="concat")
        assert list(exported) == [second.id]
        assert exported[second.id].reward == 1.0
        assert [interaction.reuse for interaction in client.tree] == ["none", "reused"]


@pytest.mark.parametrize("source", ["transformers", "directory"])
async def test_turn_two_reads_turn_one(server: ScriptedSGLang, source: str, tmp_path: Path) -> None:
    letters = [token for text in "hello" for token in server.tokenizer.encode(text).ids]
    server.script = lambda request: Script("hello", output_ids=letters)
    tokenizer = fast_tokenizer() if source == "transformers" else write_model_dir(tmp_path / "m")
    async with client_of(server.url, tokenizer=tokenizer) as client:
        ids = await two_turns(client)
        assert [interaction.interaction_id for interaction in client.tree] == [*ids]
        assert [interaction.reuse for interaction in client.tree] == ["none", "reused"]
    first, second = (request["input_ids"] for request in server.requests)
    assert second[: len(first) + len(letters)] == first + letters


async def test_an_unknown_token_id_is_recorded(server: ScriptedSGLang, client: ArealOpenAI) -> None:
    # Embeddings are padded beyond the tokenizer's ids, and a model may sample such an id.
    padded = len(fast_tokenizer()) + 5
    server.script = lambda request: Script(versions=None, output_ids=[104, padded])
    answer = await ask(client, HI)
    client.set_reward(answer, 1.0)
    row = client.export_interactions("individual")[answer]
    assert row.model_response.output_tokens[:2] == [104, padded]


async def test_rewards_pass_back_to_earlier_turns_and_agents(client: ArealOpenAI) -> None:
    first, second = await two_turns(client)
    other = await ask(client, OTHER, HI)
    client.set_reward(first, 1)
    client.set_reward(first, True)
    client.set_final_reward(np.float32(2.0))  # type: ignore[arg-type]  # any number will do
    earned = client.apply_reward_discount(turn_discount=0.5)
    assert earned == {first: 1.5, second: 1.0, other: 2.0}
    with pytest.raises(RuntimeError, match="only be called once"):
        client.apply_reward_discount()
    exported = client.export_interactions("individual")
    assert {name: interaction.reward for name, interaction in exported.items()} == earned
    assert exported[other].completion.id == other


async def test_wrong_rewards_are_refused(client: ArealOpenAI) -> None:
    with pytest.raises(RuntimeError, match="no completed interaction"):
        client.set_last_reward(1.0)
    first, second = await two_turns(client)
    with pytest.raises(KeyError, match=f"'resp-1' .* it has: {first}, {second}"):
        client.set_reward("resp-1", 1.0)
    for reward in (float("nan"), float("inf"), None):
        with pytest.raises(InvalidRewardError, match="finite"):
            client.set_last_reward(reward)  # type: ignore[arg-type]  # None is wrong, too


async def test_failed_requests_never_count(server: ScriptedSGLang, client: ArealOpenAI) -> None:
    good = await ask(client, HI)
    server.script = lambda request: Script(fault="400")
    with pytest.raises(openai.BadRequestError, match="too warm"):
        await ask(client, HI, AGAIN)
    client.set_last_reward(1.0)
    assert client.export_interactions()[good].reward == 1.0
    assert len(client.tree) == 1


async def test_tensors_have_the_shapes_and_types_of_areal(client: ArealOpenAI) -> None:
    first, second = await two_turns(client)
    client.set_last_reward(1.0)
    interaction = client.get_interaction(second)
    assert interaction is not None
    tensors = interaction.to_tensor_dict()
    assert interaction.to_tensor_dict() is tensors
    answer = interaction.model_response
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
    assert [message["role"] for message in interaction.messages] == ["user", "assistant", "user"]


async def test_concat_gives_a_row_per_leaf_and_each_reply_once(server: ScriptedSGLang) -> None:
    async with client_of(server.url, chat_template_type="concat") as client:
        first, second = await two_turns(client)
        reply: ChatCompletionMessageParam = {"role": "assistant", "content": "hello world"}
        third = await ask(client, HI, reply, {"role": "user", "content": "else"})
        client.set_reward(second, 1.0)
        client.set_reward(third, 0.0)
        exported = client.export_interactions("concat", reward_discount=0.5)
        assert [*exported] == [second, third]
        assert [interaction.reward for interaction in exported.values()] == [1.0, 0.0]
        left, right = (interaction.to_tensor_dict() for interaction in exported.values())
        assert sorted(set(left["turn_ids"][0].tolist())) == [-1, 0, 1]
        assert sorted(set(right["turn_ids"][0].tolist())) == [-1, 0]
        output_tokens = sum(interaction.num_output_tokens for interaction in client.tree)
        assert left["loss_mask"].sum() + right["loss_mask"].sum() == output_tokens
        assert set(client.export_interactions("individual")) == {first, second, third}


async def test_an_unused_reply_to_a_repeated_request_can_be_dropped(client: ArealOpenAI) -> None:
    lost = await ask(client, HI)
    _, last = await two_turns(client, retries=1)
    client.set_reward(last, 1.0)
    exported = client.export_interactions(reward_discount=1.0, drop_retry_orphans=True)
    assert lost not in exported
    assert [interaction.reward for interaction in exported.values()] == [1.0, 1.0]
    assert lost in client.export_interactions()


async def test_what_cannot_be_exported_is_refused(client: ArealOpenAI) -> None:
    assert client.export_interactions() == {}
    with pytest.raises(ValueError, match="Cannot export interactions in 'concat' style"):
        client.export_interactions("concat")
    with pytest.raises(ValueError, match="Invalid export interactions style tree"):
        client.export_interactions("tree")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chat_template_type"):
        ArealOpenAI("http://nowhere", fast_tokenizer(), chat_template_type="hg")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="expected a fast tokenizer"):
        ArealOpenAI("http://nowhere", byte_level_tokenizer())


async def test_streams_and_length_limits_are_those_of_the_proxy(server: ScriptedSGLang) -> None:
    async with client_of(server.url, engine_max_tokens=64) as client:
        create = client.chat.completions.create
        stream = await create(model="m", messages=[HI], stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "hello world"
        assert len(client.tree) == 1
        await create(model="m", messages=[HI], max_tokens=65)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens"):
            await ask(client, {"role": "user", "content": "hi " * 64})
    request = server.requests[1]
    assert request["sampling_params"]["max_new_tokens"] == 64 - len(request["input_ids"])


async def test_clients_of_one_engine_share_only_its_connections(server: ScriptedSGLang) -> None:
    engine = EngineEndpoint(server.url)
    async with client_of(engine) as first, client_of(engine) as second, client_of(engine) as third:
        clients = (first, second, third)
        await asyncio.gather(*(two_turns(client) for client in clients))
        assert [len(client.tree) for client in clients] == [2, 2, 2]
        assert len(set().union(*(client.export_interactions() for client in clients))) == 6
    await engine.close()


async def test_an_engine_may_want_a_key(server: ScriptedSGLang) -> None:
    async with client_of(EngineAddress(server.url, "sk-engine")) as client:
        await ask(client, HI)
    assert server.keys == ["Bearer sk-engine"]
