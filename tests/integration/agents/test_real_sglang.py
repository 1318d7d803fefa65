"""Proxy and client record the real SGLang's exact tokens and log-probabilities."""

import asyncio
import json
import re
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_hpc.client.areal_openai import ArealOpenAI
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.wire.ledger import TicketRef
from tests.integration.agents.theatre import Theatre
from tests.integration.proxy.tool_questions import CHAT_TOOL, QUESTION
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

EPISODES = 6
TURNS = 3
REF = TicketRef(1001, 0)
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "schema": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def stage(theatre: Theatre) -> Stage:
    return theatre.stage


@pytest.fixture
def sglang_url(theatre: Theatre) -> str:
    return theatre.url


def generate(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/generate", json=body, timeout=scaled(60), trust_env=False)
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


@pytest.mark.asyncio
async def test_what_is_recorded_is_what_the_engine_read_and_said(
    stage: Stage, sglang_url: str
) -> None:
    sessions = [stage.open_session(REF, episode=i) for i in range(EPISODES)]
    await asyncio.gather(*(converse(stage, key, i) for i, (_, key) in enumerate(sessions)))
    for number, (_, key) in enumerate(sessions):
        stage.finish_session(key, float(number))
    assert stage.finish_ticket(REF, *(session_id for session_id, _ in sessions)) == EPISODES
    assert stage.seal() == 1
    settled = stage.ledger.settled[-1]
    assert settled.rewards == [float(number) for number in range(EPISODES)]
    encoder = TokenEncoder.from_model_dir(stage.model_dir)
    for row in stage.sealed_rows(REF):
        calls = row.record.calls
        assert [call.reuse for call in calls] == ["none"] + ["reused"] * (TURNS - 1)
        assert [call.cached_tokens > 0 for call in calls[1:]] == [True] * (TURNS - 1)
        assert set(row.versions_T[row.loss_mask_T == 1].tolist()) == {1 << 32}
        text = encoder.decode(row.input_ids_T.tolist())
        for turn in range(TURNS - 1):
            assert f"<|im_end|>\n<|im_start|>user\nand {turn}?<|im_end|>" in text
        scored = scores(sglang_url, row.input_ids_T.tolist(), row.temperature)
        reply_T = row.loss_mask_T == 1
        assert np.abs(scored[reply_T] - row.logprobs_T[reply_T]).max() < 1e-4


def scores(url: str, ids: list[int], temperature: float) -> np.ndarray[Any, Any]:
    """Return the engine's log-probability of every token of a complete sequence."""
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
        (Script("hello world", finish="length"), {"max_new_tokens": 2, "ignore_eos": True}),
        (Script("hello", finish="eos"), {"max_new_tokens": 64, "stop_token_ids": [*range(3, 300)]}),
        (
            Script("hello", finish="stop:l"),
            {"max_new_tokens": 200, "stop": [*"aeioutnl 0"], "ignore_eos": True},
        ),
    ],
)
def test_scripted_payloads_are_those_of_the_real_server(
    stage: Stage, sglang_url: str, script: Script, sampling: dict[str, Any]
) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 1.0, "top_k": 9, **sampling},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_sampling_mask": True,
        "rid": f"rid-{script.finish}",
    }
    real = generate(sglang_url, body)
    scripted = stage.sglang._payload(body, script)
    assert_same_shape(scripted, real, "")
    assert real["meta_info"]["finish_reason"]["type"] == (
        "length" if script.finish == "length" else "stop"
    )
    assert real["meta_info"]["weight_versions"][-1]["end"] == len(real["output_ids"])


def stream(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream(
        "POST",
        f"{url}/generate",
        json={**body, "stream": True},
        timeout=scaled(60),
        trust_env=False,
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_scripted_streams_are_those_of_the_real_server(stage: Stage, sglang_url: str) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "rid": "rid-stream",
    }
    stage.sglang.incremental = True
    script = Script("one two three four five", finish="length", piece_tokens=3)
    scripted = list(stage.sglang.pieces(body, script))
    real = stream(sglang_url, body)
    assert_same_shape(scripted[0], real[0], "")
    assert_same_shape(scripted[-1], real[-1], "")
    assert "weight_versions" not in real[0]["meta_info"]
    assert sum(len(piece["output_ids"]) for piece in real) == 12
    assert sum(len(piece["meta_info"]["output_token_logprobs"]) for piece in real) == 12
    refused = {"max_new_tokens": 4, "regex": "("}
    (refusal,) = stream(sglang_url, {**body, "rid": "refused", "sampling_params": refused})
    assert refusal["meta_info"]["finish_reason"]["status_code"] == 400


def test_a_streamed_reply_is_the_whole_reply(stage: Stage) -> None:
    _, key = stage.open_session(REF)
    body: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "stop": ["zz"], "logprobs": True}
    body["logit_bias"] = {"2": -100}
    full = stage.chat(key, QUESTION, **body).json()["choices"][0]
    with stage.client(key) as client:
        chunks = list(
            client.chat.completions.create(model="m", messages=QUESTION, stream=True, **body)
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == full["message"]["content"]
    assert chunks[-1].choices[0].finish_reason == full["finish_reason"]
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in tokens] == [t["token"] for t in full["logprobs"]["content"]]
    assert len(chunks) > 10


MASKED: list[dict[str, Any]] = [
    {"top_p": 0.8, "temperature": 0.7},
    {"top_k": 20},
    {"min_p": 0.05, "stream": True},
    {"regex": "(yes|no|maybe) [0-9]{3,12}", "stream": True},
]


def test_what_could_be_sampled_is_recorded_with_the_odds_of_the_model(stage: Stage) -> None:
    """Log-probabilities are those of transformers, over the tokens that the engine left."""
    ref = TicketRef(1002, 0)
    sessions = [
        stage.open_session(ref, episode=i, records_sampling_mask=True)
        for i in range(len(MASKED) + 1)
    ]
    for (_, key), options in zip(sessions, [*MASKED, {}], strict=True):
        reply = stage.chat(key, QUESTION, max_tokens=24, **options)
        assert reply.status_code == 200, reply.text
        stage.finish_session(key, 1.0)
    stage.finish_ticket(ref, *(session_id for session_id, _ in sessions))
    stage.seal()
    *rows, plain = stage.sealed_rows(ref)
    assert plain.sampling_mask is None
    model = AutoModelForCausalLM.from_pretrained(stage.model_dir, dtype=torch.float64)
    for row, options in zip(rows, MASKED, strict=True):
        ids = torch.from_numpy(row.input_ids_T).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0] / options.get("temperature", 1.0)
        mask = row.sampling_mask
        assert mask is not None
        assert (mask.counts_T > 0).tolist() == (row.loss_mask_T == 1).tolist()
        ends = np.cumsum(mask.counts_T.astype(int))
        for position in np.flatnonzero(row.loss_mask_T):
            kept_ids = mask.ids[ends[position] - mask.counts_T[position] : ends[position]]
            chances = logits[position - 1].log_softmax(-1)
            share = chances[torch.from_numpy(kept_ids).long()].exp().sum().item()
            expected = chances[ids[position]].item() - np.log(share)
            facts = options, position, int(ids[position]), kept_ids.tolist()[:40], share
            assert row.logprobs_T[position] == pytest.approx(expected, abs=1e-4), facts
            assert len(kept_ids) <= options.get("top_k", 4096)
            assert share >= options.get("top_p", 0.0) - 1e-4
        if "regex" in options:
            assert mask.counts_T.max() < 20, "of a grammar few tokens are left"


def test_a_least_length_forbids_the_tokens_that_are_recorded(stage: Stage) -> None:
    ref, least = TicketRef(1003, 0), 12
    session_id, key = stage.open_session(ref)
    assert stage.chat(key, QUESTION, min_tokens=least, max_tokens=16).status_code == 200
    stage.finish_session(key, 1.0)
    stage.finish_ticket(ref, session_id)
    stage.seal()
    (row,) = stage.sealed_rows(ref)
    (call,) = row.record.calls
    stops = call.sampling["stop_token_ids"]
    assert (call.sampling["min_new_tokens"], len(stops) > 0) == (least, True)
    model = AutoModelForCausalLM.from_pretrained(stage.model_dir, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.from_numpy(row.input_ids_T).long()[None]).logits[0]
    logits[call.prompt_tokens - 1 : call.prompt_tokens - 1 + least, stops] = -torch.inf
    places = np.flatnonzero(row.loss_mask_T)
    assert len(places) >= least
    for position in places:
        expected = logits[position - 1].log_softmax(-1)[row.input_ids_T[position]].item()
        assert row.logprobs_T[position] == pytest.approx(expected, abs=1e-4), position


def test_a_client_that_hangs_up_frees_the_real_engine(stage: Stage) -> None:
    _, key = stage.open_session(REF)
    options: Any = {"stream": True, "max_tokens": 900, "logit_bias": {"2": -100}}
    with (
        stage.client(key) as client,
        client.chat.completions.create(model="m", messages=QUESTION, **options) as chunks,
    ):
        for _ in range(5):
            next(iter(chunks))
    (interaction,) = stage.await_journaled(key)
    assert interaction.finish_reason == "abort"
    assert 0 < interaction.num_output_tokens < 900


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "(yes|no) [0-9]{3}"}, "(yes|no) [0-9]{3}"),
        ({"response_format": SCHEMA}, r'\s*\{\s*"x"\s*:\s*[0-9]\s*\}'),
        ({"response_format": {"type": "json_object"}, "max_tokens": 60}, r"\s*\{(.|\s)*"),
    ],
)
def test_replies_follow_their_grammar(stage: Stage, asked: dict[str, Any], pattern: str) -> None:
    _, key = stage.open_session()
    answer = stage.ask(key, "Say it", **asked)
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(pattern, answer.json()["choices"][0]["message"]["content"])


def assert_same_shape(ours: Any, theirs: Any, where: str) -> None:
    """Assert that the real server sends each field of the script with the same type."""
    assert type(ours) is type(theirs), f"{where}: {ours!r} and {theirs!r}"
    if isinstance(ours, dict):
        assert ours.keys() <= theirs.keys(), where
        for name in ours:
            assert_same_shape(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(ours, list) and ours and theirs:
        assert_same_shape(ours[0], theirs[0], f"{where}[0]")


@pytest.mark.parametrize("asked", [{}, {"parallel_tool_calls": False}])
def test_the_real_engine_calls_the_tool_it_must(stage: Stage, asked: dict[str, Any]) -> None:
    strict = {**CHAT_TOOL, "function": {**CHAT_TOOL["function"], "strict": True}}
    asked = {**asked, "tool_choice": "required", "max_tokens": 200, "logit_bias": {"2": -5}}
    _, key = stage.open_session()
    answer = stage.chat(key, QUESTION, tools=[strict], **asked)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message.get("tool_calls"), message
    assert message["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.asyncio
async def test_a_client_records_what_the_engine_read_and_said(theatre: Theatre) -> None:
    tokenizer = AutoTokenizer.from_pretrained(theatre.stage.model_dir)
    client = ArealOpenAI(theatre.url, tokenizer, chat_template_type="concat")
    create = client.chat.completions.create
    first = await create(model="m", messages=QUESTION, max_tokens=12)
    said = first.choices[0].message
    messages: list[Any] = [*QUESTION, said, {"role": "user", "content": "Sure?"}]
    await create(model="m", messages=messages, max_tokens=12)
    client.set_final_reward(1.0)
    await client.close()
    (row,) = client.export_interactions("concat", 0.5).values()
    tensors = {name: tensor[0].numpy() for name, tensor in row.to_tensor_dict().items()}
    assert row.interaction.reuse == "reused"
    reply = tensors["loss_mask"] == 1
    scored = np.asarray(scores(theatre.url, tensors["input_ids"].tolist(), 1.0))
    assert np.abs(tensors["logprobs"] - scored)[reply].max() < 1e-3
    assert (tensors["versions"] == np.where(reply, 1 << 32, -1)).all()
