"""Plain prompts: OpenAI's legacy completions, and tokens as SGLang's own routes give them."""

from typing import Any

import httpx
import pytest

from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.talk import chunks_of, counted, turn
from tests.support.proxy_stage import Stage

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
    sent = [request["input_ids"] for request in stage.sglang.requests]
    assert sent == [letters, letters, *[stage.tokenizer.encode("hello").ids] * 2]


@pytest.mark.parametrize("stop", [None, "\nObservation:"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_longer_prompts_keep_tokens(stage: Stage, key: str, stop: str | None, as_ids: bool) -> None:
    said = "Think.\nObservation:" if stop else "Think."
    letters = stage.speak_in_letters(said, f"stop:{stop}" if stop else "length")
    before = counted(stage, REUSED)
    prompt = PROMPT
    for number in range(3):
        asked = stage.tokenizer.encode(PROMPT).ids if number == 0 else None
        if as_ids and number:
            last = stage.sglang.requests[-1]["input_ids"]
            asked = [*last, *letters, *stage.tokenizer.encode(" 42\n").ids]
        text = ask(stage, key, asked if as_ids else prompt, stop=stop).json()["choices"][0]["text"]
        assert text == "Think."
        prompt += text + (stop or "") + " 42\n"
    stage.assert_continued(letters)
    assert stage.tokenizer.decode(stage.sglang.requests[-1]["input_ids"]) == PROMPT + 2 * (
        said + " 42\n"
    )
    assert counted(stage, REUSED) - before == 2
    one, two, three = stage.journaled(key)
    assert (two.parent_id, three.parent_id) == (one.interaction_id, two.interaction_id)


def test_a_prompt_without_the_end_of_a_reply_is_not_its_continuation(stage: Stage) -> None:
    _, key = stage.open_session(TicketRef(1, 0))
    ask(stage, key)  # the model ended its turn with a token that the text does not show
    assert ask(stage, key, PROMPT + "hello world and").status_code == 200
    sent = stage.sglang.requests[-1]["input_ids"]
    assert sent == stage.tokenizer.encode(PROMPT + "hello world and").ids
    assert [one.parent_id for one in stage.journaled(key)] == [None, None]


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
    whole = ask(stage, key, logprobs=2).json()
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(ask(stage, key, logprobs=2, **options))
    assert len(chunks) > 3
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    told = [chunk["choices"][0] for chunk in chunks]
    (choice,) = whole["choices"]
    assert "".join(one["text"] for one in told) == choice["text"] == "hello world"
    assert told[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    parts = [one["logprobs"] for one in told if one["logprobs"]]
    for name, values in choice["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values
    assert choice["logprobs"]["text_offset"][:2] == [0, 4]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert [one.reply["content"] for one in stage.journaled(key)] == ["hello world"] * 2
