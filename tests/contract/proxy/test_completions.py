"""Completions work for plain prompts: legacy completions, SGLang's token routes, `/generate`."""

import re
import threading
from typing import Any, Literal

import httpx
import pytest

from areal_hpc.session.call_records import decode_sampling_params_json
from areal_hpc.session.tree import pack_counts_as_uint16, pack_ids, pack_logprobs, unpack_ids
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import MAX_MASK_TOKENS_PER_POSITION, SessionLimits
from tests.contract.proxy.talk import change_call, chunks_of, counted, generate_reply, turn
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script
from tests.support.waiting import wait_for

PROMPT = "What is 3 + 4?"
REUSED = 'prompts_total{reuse="reused"}'


def ask(stage: Stage, key: str, prompt: object = PROMPT, **more: Any) -> httpx.Response:
    return stage.post("/v1/completions", {"prompt": prompt, **more}, key)


def test_the_openai_sdk_completes_a_text(stage: Stage) -> None:
    _, key = stage.open_session(temperature=0.5, max_new_tokens=33)
    with stage.client(key) as client:
        completion = client.completions.create(model="m", prompt=PROMPT, stop="END", seed=3)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason) == ("hello world", "stop")
    (request,) = stage.sglang.requests
    assert stage.tokenizer.decode(request["input_ids"]) == PROMPT
    names = ("temperature", "max_new_tokens", "stop", "sampling_seed")
    assert [request["sampling_params"][name] for name in names] == [0.5, 33, ["END"], 3]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(request["input_ids"])


def test_token_ids_are_read_as_they_are(stage: Stage, key: str) -> None:
    letters = stage.speak_in_letters("hello")
    for prompt in (letters, [letters], ["hello"], "hello"):
        assert ask(stage, key, prompt).status_code == 200
    prompts = [request["input_ids"] for request in stage.sglang.requests]
    assert prompts == [letters, letters, *[stage.tokenizer.encode("hello").ids] * 2]


@pytest.mark.parametrize("stop", [None, "\nObservation:"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_longer_prompts_keep_tokens(stage: Stage, key: str, stop: str | None, as_ids: bool) -> None:
    reply = "Think.\nObservation:" if stop else "Think."
    letters = stage.speak_in_letters(reply, f"stop:{stop}" if stop else "length")
    before = counted(stage, REUSED)
    prompt = PROMPT
    for number in range(3):
        ids = stage.tokenizer.encode(PROMPT).ids if number == 0 else None
        if as_ids and number:
            last = stage.sglang.requests[-1]["input_ids"]
            ids = [*last, *letters, *stage.tokenizer.encode(" 42\n").ids]
        text = ask(stage, key, ids if as_ids else prompt, stop=stop).json()["choices"][0]["text"]
        assert text == "Think."
        prompt += text + (stop or "") + " 42\n"
    stage.assert_continued(letters)
    assert stage.tokenizer.decode(stage.sglang.requests[-1]["input_ids"]) == PROMPT + 2 * (
        reply + " 42\n"
    )
    assert counted(stage, REUSED) - before == 2
    first, second, third = stage.journaled(key)
    assert (second.parent_id, third.parent_id) == (first.interaction_id, second.interaction_id)


def test_a_prompt_without_the_end_of_a_reply_is_not_its_continuation(stage: Stage) -> None:
    _, key = stage.open_session(TicketRef(1, 0))
    ask(stage, key)  # the model ended its turn with a token that the text does not show
    assert ask(stage, key, PROMPT + "hello world and").status_code == 200
    input_ids = stage.sglang.requests[-1]["input_ids"]
    assert input_ids == stage.tokenizer.encode(PROMPT + "hello world and").ids
    assert [entry.parent_id for entry in stage.journaled(key)] == [None, None]


def test_a_chat_may_be_continued_with_plain_tokens(stage: Stage, key: str) -> None:
    letters = stage.speak_in_letters()
    stage.ask(key, PROMPT)
    messages = [{"role": "user", "content": PROMPT}, *turn("hello")]
    tokens = stage.post("/tokenize", {"messages": messages}, key).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert ask(stage, key, tokens["tokens"]).status_code == 200
    assert stage.sglang.requests[1]["input_ids"] == tokens["tokens"]
    stage.assert_continued(letters)
    first, second = stage.journaled(key)
    assert second.parent_id == first.interaction_id


def test_a_text_is_tokenized_and_put_together_again(stage: Stage, key: str) -> None:
    text = "hello <|im_end|> wörld"
    reply = stage.post("/tokenize", {"prompt": text}, key).json()
    assert reply["tokens"] == stage.tokenizer.encode(text).ids
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 2048)
    body = {"tokens": reply["tokens"], "skip_special_tokens": False}
    assert stage.post("/detokenize", body, key).json() == {"text": text}
    assert stage.end_session(key) == 0


@pytest.mark.usefixtures("pieces")
def test_a_stream_tells_the_same_completion_as_a_whole_reply(stage: Stage, key: str) -> None:
    complete = ask(stage, key, logprobs=2).json()
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(ask(stage, key, logprobs=2, **options))
    assert len(chunks) > 3
    assert last["choices"] == []
    assert last["usage"] == complete["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    (choice,) = complete["choices"]
    assert "".join(part["text"] for part in choices) == choice["text"] == "hello world"
    assert choices[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    parts = [part["logprobs"] for part in choices if part["logprobs"]]
    for name, values in choice["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values
    assert choice["logprobs"]["text_offset"][:2] == [0, 4]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert [entry.reply["content"] for entry in stage.journaled(key)] == ["hello world"] * 2


BODY: dict[str, Any] = {
    "input_ids": [5, 6],
    "sampling_params": {"temperature": 0.5, "max_new_tokens": 4},
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs_num": 1_000_000}, "top_logprobs_num"),
    ({"n": 300}, "n"),
    ({"lora_path": "/etc"}, "lora_path"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"sampling_params": {"n": 300}}, "sampling_params.n"),
    ({"sampling_params": {"temperature": 1e308}}, "sampling_params.temperature"),
    ({"sampling_params": {"custom_params": {}}}, "sampling_params.custom_params"),
    ({"sampling_params": {"stop_token_ids": [512]}}, "sampling_params.stop_token_ids"),
    ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params"),
    ({"input_ids": [512]}, "input_ids"),
    ({"input_ids": [[5], [6]]}, "input_ids[0]"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [5] * 2048}, "input_ids"),
    ({"stream": True}, "stream"),
]


@pytest.mark.parametrize(("change", "key_at_fault"), WRONG, ids=[name for _, name in WRONG])
def test_what_sglang_may_die_of_is_refused_by_name(
    stage: Stage, key: str, change: dict[str, Any], key_at_fault: str
) -> None:
    answer = stage.post("/generate", BODY | change, key)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == key_at_fault
    assert stage.sglang.requests == []


def test_sglang_gets_the_allowed_fields_under_a_name_of_the_proxys(stage: Stage, key: str) -> None:
    for _ in range(2):
        body = BODY | {"rid": "a", "top_logprobs_num": 2, "return_logprob": False}
        assert stage.post("/generate", body, key).status_code == 200
    names = {request.pop("rid") for request in stage.sglang.requests}
    assert len(names) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)
    for request in stage.sglang.requests:
        sampling = request.pop("sampling_params")
        assert sampling | BODY["sampling_params"] == sampling
        assert request == {"input_ids": [5, 6], "top_logprobs_num": 2, "return_logprob": True}


def test_a_hang_up_aborts_that_request_alone(stage: Stage, key: str) -> None:
    gate = threading.Event()
    stage.sglang.script = lambda request: Script(gate=gate)
    caller = stage.begin("/generate", BODY | {"rid": "a"}, key)
    wait_for(lambda: stage.sglang.requests)
    caller.close()
    wait_for(lambda: len(stage.sglang.aborted) == 1)
    gate.set()
    assert stage.sglang.aborted == [request["rid"] for request in stage.sglang.requests]
    assert stage.sglang.aborted != ["a"], "that would begin the names of others, too"


def test_only_a_session_opened_for_it_generates_and_records_by_itself(stage: Stage) -> None:
    _, key = stage.open_session(TicketRef(1, 0), records_calls=False)
    assert stage.ask(key, "hi").status_code == 200
    (recorded,) = stage.await_journaled(key)
    fields = {name: getattr(recorded, name) for name in recorded.__struct_fields__}
    never_said = {"interactions": [fields | {"interaction_id": "never-said"}]}
    requests = len(stage.sglang.requests)
    for route, body in (("/generate", BODY), ("/rl/record", never_said)):
        answer = stage.post(route, body, key)
        assert answer.status_code == 403
        assert "not opened for a client that records its own calls" in answer.text
    assert len(stage.sglang.requests) == requests
    assert [entry.interaction_id for entry in stage.journaled(key)] == [recorded.interaction_id]


def test_an_episodes_turns_and_tokens_are_those_of_generate_too(stage: Stage) -> None:
    stage.sglang.script = lambda request: Script("a", "length", output_ids=[5] * 4)
    for limits, key_at_fault in (
        (SessionLimits(max_turns=2), "limits.max_turns"),
        (SessionLimits(max_tokens=7), "limits.max_tokens"),
    ):
        _, key = stage.open_session(TicketRef(1, 0), limits=limits)
        stage.sglang.requests.clear()
        assert [stage.post("/generate", BODY, key).status_code for _ in range(2)] == [200, 200]
        refused = stage.post("/generate", BODY, key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, key_at_fault)
        max_tokens = [call["sampling_params"]["max_new_tokens"] for call in stage.sglang.requests]
        assert max_tokens == ([4, 4] if limits.max_turns else [4, 3])


def test_what_was_recorded_counts_once_against_the_limits(stage: Stage) -> None:
    _, first = stage.open_session(TicketRef(1, 0))
    assert stage.ask(first, "hi").status_code == 200
    (reply,) = stage.await_journaled(first)
    limits = SessionLimits(max_turns=3, max_tokens=3 * reply.num_output_tokens)
    _, key = stage.open_session(TicketRef(2, 0), limits=limits)
    for name in ("one", "two"):
        generate_reply(stage, key, reply)
        call = change_call(reply, interaction_id=name)
        assert stage.post("/rl/record", {"interactions": [call]}, key).status_code == 200
    stage.restart_proxy()
    stage.route_to(stage.sglang.url)
    assert stage.post("/generate", BODY, key).status_code == 200
    assert stage.post("/generate", BODY, key).status_code == 400


def test_a_session_bound_to_the_recipe_generates_and_records_by_its_sampling(stage: Stage) -> None:
    own: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    _, first = stage.open_session(TicketRef(1, 0))
    assert stage.ask(first, "hi", temperature=0.1).status_code == 200
    (reply,) = stage.await_journaled(first)
    _, key = stage.open_session(TicketRef(2, 0), sampling_from="recipe", **own)
    generate_reply(stage, key, reply)
    params = stage.sglang.requests[-1]["sampling_params"]
    assert {name: params[name] for name in own} == own
    recorded = stage.post("/rl/record", {"interactions": [change_call(reply)]}, key)
    assert recorded.status_code == 200, recorded.text
    (own_reply,) = stage.await_journaled(key)
    assert own_reply.temperature == 0.7
    sampling = decode_sampling_params_json(own_reply.sampling)
    assert {name: sampling[name] for name in own} == own
    assert own_reply.ignored == [*own]


@pytest.mark.parametrize("bound_to", ["recipe", "agent"])
def test_masks_are_asked_for_and_kept(stage: Stage, bound_to: Literal["recipe", "agent"]) -> None:
    _, first = stage.open_session(TicketRef(1, 0))
    assert stage.ask(first, "hi").status_code == 200
    (reply,) = stage.await_journaled(first)
    _, key = stage.open_session(
        TicketRef(2, 0), sampling_from=bound_to, top_p=0.9, records_sampling_mask=True
    )
    generate_reply(stage, key, reply, top_p=0.9)
    request = stage.sglang.requests[-1]
    assert request["return_sampling_mask"]
    vocab_size = request["sampling_params"]["top_k"]
    assert 300 < vocab_size <= MAX_MASK_TOKENS_PER_POSITION, "SGLang tells it of a bounded number"
    ids = unpack_ids(reply.output_ids).tolist()
    logprobs = pack_logprobs([-0.25 - 0.001 * i for i in range(len(ids))])
    kept_counts = pack_counts_as_uint16([2] * len(ids))
    mask = [kept_id for token in ids for kept_id in (token, (token + 1) % 300)]
    masked = {"logprobs": logprobs, "kept_counts": kept_counts, "kept_ids": pack_ids(mask)}
    for altered in (
        {},
        {"logprobs": logprobs},
        {**masked, "kept_ids": pack_ids([token if token in ids else token + 1 for token in mask])},
    ):
        refused = stage.post("/rl/record", {"interactions": [change_call(reply, **altered)]}, key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "interactions")
    recorded = stage.post("/rl/record", {"interactions": [change_call(reply, **masked)]}, key)
    assert recorded.status_code == 200, recorded.text
    (own_reply,) = stage.await_journaled(key)
    assert {name: getattr(own_reply, name) for name in masked} == masked
