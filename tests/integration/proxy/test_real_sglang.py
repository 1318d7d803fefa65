"""The proxy in front of the real SGLang: exact tokens, exact log-probabilities, same payloads."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from areal_hpc.session.template import TokenEncoder
from areal_hpc.shards.reader import ShardReader
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import FinishTicketRequest
from tests.contract.proxy.proxy_stage import Stage
from tests.contract.proxy.scripted_sglang import Script

EPISODES = 6
TURNS = 3
REF = TicketRef(1, 0)


def generate(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


async def converse(stage: Stage, key: str, number: int) -> None:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key) as client:
        messages: list[Any] = [{"role": "user", "content": f"What is {number} + 4?"}]
        for turn in range(TURNS):
            completion = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=24 + 8 * turn,
                temperature=1.0,  # the engine scores prompts unscaled
                stop=["e"] if turn == 1 else None,
            )
            messages += [completion.choices[0].message, {"role": "user", "content": f"and {turn}?"}]


def test_what_is_recorded_is_what_the_engine_read_and_said(stage: Stage, sglang_url: str) -> None:
    sessions = [stage.open_session(REF, episode=i) for i in range(EPISODES)]

    async def everyone() -> None:
        await asyncio.gather(*(converse(stage, key, i) for i, (_, key) in enumerate(sessions)))

    asyncio.run(everyone())
    for number, (_, key) in enumerate(sessions):
        stage.finish_session(key, float(number))
    request = FinishTicketRequest(REF, [session_id for session_id, _ in sessions])
    reply = stage.post("/rl/finish_ticket", request)
    assert reply.json() == {"rows": EPISODES}, reply.text
    assert stage.post("/rl/seal", {}).json() == {"tickets": 1}
    (settled,) = stage.ledger.settled
    assert settled.rewards == [float(number) for number in range(EPISODES)]
    encoder = TokenEncoder.from_model_dir(stage.model_dir)
    for row in ShardReader(stage.layout.shards_dir / settled.shard).read_rows(settled.rows):
        assert len(row.meta["interaction_ids"]) == TURNS
        assert row.meta["splices"] == ["root"] + ["spliced"] * (TURNS - 1)
        assert set(row.versions_T[row.loss_mask_T == 1].tolist()) == {1 << 32}
        text = encoder.decode(row.input_ids_T.tolist())
        for turn in range(TURNS - 1):
            assert f"<|im_end|>\n<|im_start|>user\nand {turn}?<|im_end|>" in text
        scored = scores(sglang_url, row.input_ids_T.tolist(), row.temperature)
        said = row.loss_mask_T == 1
        assert np.abs(scored[said] - row.logprobs_T[said]).max() < 1e-4


def scores(url: str, ids: list[int], temperature: float) -> np.ndarray[Any, Any]:
    """The engine's log-probability of every token of a sequence it is given whole."""
    reply = generate(
        url,
        {
            "input_ids": ids,
            "sampling_params": {"temperature": temperature, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    )
    return np.array([entry[0] or 0.0 for entry in reply["meta_info"]["input_token_logprobs"]])


@pytest.mark.parametrize(
    ("script", "sampling"),
    [
        (Script("hello world", finish="length"), {"max_new_tokens": 2}),
        (Script("hello", finish="eos"), {"max_new_tokens": 64, "stop_token_ids": [*range(3, 300)]}),
        (Script("hello", finish="stop:l"), {"max_new_tokens": 200, "stop": [*"aeioutnl 0"]}),
    ],
)
def test_scripted_payloads_are_those_of_the_real_server(
    stage: Stage, sglang_url: str, script: Script, sampling: dict[str, Any]
) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 1.0, **sampling},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "rid": f"rid-{script.finish}",
    }
    real = generate(sglang_url, body)
    scripted = stage.sglang._payload(body, script)
    assert_same_shape(scripted, real, "")
    assert real["meta_info"]["finish_reason"]["type"] == (
        "length" if script.finish == "length" else "stop"
    )
    assert real["meta_info"]["weight_versions"][-1]["end"] == len(real["output_ids"])


def assert_same_shape(ours: Any, theirs: Any, where: str) -> None:
    """Every field that the script sends is one the real server sends, of the same type."""
    assert type(ours) is type(theirs), f"{where}: {ours!r} and {theirs!r}"
    if isinstance(ours, dict):
        assert ours.keys() <= theirs.keys(), where
        for name in ours:
            assert_same_shape(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(ours, list) and ours and theirs:
        assert_same_shape(ours[0], theirs[0], f"{where}[0]")


def test_a_server_that_refuses_and_limits_are_the_requests_fault(stage: Stage) -> None:
    _, key = stage.open_session()
    answer = stage.ask(key, "hi", stop=["x"] * 3, max_tokens=1023)
    assert answer.status_code == 400
    assert "1024" in answer.json()["error"]["message"]
    choices = stage.ask(key, "hi", n=3, max_tokens=4, logprobs=True, top_logprobs=3).json()[
        "choices"
    ]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [4, 4, 4]
    assert len(choices[0]["logprobs"]["content"][0]["top_logprobs"]) == 3
