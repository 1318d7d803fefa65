"""A client in this process records the real SGLang as the proxy does."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoTokenizer

from areal_hpc.client.areal_openai import ArealOpenAI
from tests.integration.proxy.test_real_sglang import scores

QUESTION: ChatCompletionMessageParam = {"role": "user", "content": "What is 3 + 4?"}


def test_a_client_records_what_the_engine_read_and_said(sglang_url: str, model_dir: Path) -> None:
    async def two_turns() -> ArealOpenAI:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        client = ArealOpenAI(sglang_url, tokenizer, chat_template_type="concat")
        create = client.chat.completions.create
        first = await create(model="m", messages=[QUESTION], max_tokens=12)
        reply = first.choices[0].message
        messages: list[Any] = [QUESTION, reply, {"role": "user", "content": "Sure?"}]
        await create(model="m", messages=messages, max_tokens=12)
        client.set_final_reward(1.0)
        await client.close()
        return client

    (row,) = asyncio.run(two_turns()).export_interactions("concat", 0.5).values()
    tensors = {name: tensor[0].numpy() for name, tensor in row.to_tensor_dict().items()}
    assert row.interaction.reuse == "reused"
    said = tensors["loss_mask"] == 1
    scored = np.asarray(scores(sglang_url, tensors["input_ids"].tolist(), 1.0))
    assert np.abs(tensors["logprobs"] - scored)[said].max() < 1e-3
    assert (tensors["versions"] == np.where(said, 1 << 32, -1)).all()
