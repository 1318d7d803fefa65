"""What holds in every dialect, and when a conversation changes from one to another."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from anthropic import APIStatusError, AsyncAnthropic
from openai import APIError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from areal_hpc.wire.ledger import TicketRef
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import MUCH_CHARS, TALKATIVE, Script

QUESTION = "What is 3 + 4?"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
Reader = Callable[[Stage, str], AsyncIterator[str]]


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/chat/completions", {"messages": MESSAGES}),
        ("/completions", {"prompt": "hi"}),
        ("/messages?beta=true", {"messages": MESSAGES}),
        ("/messages/count_tokens?beta=true", {"messages": MESSAGES}),
        ("/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_both_prefixes_and_both_kinds_of_key_open_a_session(
    stage: Stage, prefix: str, header: str, route: str, body: dict[str, Any]
) -> None:
    _, key = stage.open_session()
    headers = {header: f"Bearer {key}" if header == "authorization" else key}
    headers["anthropic-version"] = "2023-06-01"
    answer = stage.http.post(f"{stage.url}{prefix}{route}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("middle", ["messages", "responses"])
def test_a_conversation_may_change_its_dialect(stage: Stage, middle: str) -> None:
    letters = stage.speak_in_letters()
    _, key = stage.open_session()
    first = stage.chat(key, MESSAGES).json()
    history = [*MESSAGES, {"role": "assistant", "content": "hello"}]
    history.append({"role": "user", "content": "and 1?"})
    if middle == "messages":
        body = {"messages": history, "max_tokens": 64}
        assert stage.post("/v1/messages", body, key).status_code == 200
    else:
        asked = {"input": "and 1?", "previous_response_id": first["id"]}
        assert stage.post("/v1/responses", asked, key).json()["status"] == "incomplete"
    history += [history[1], {"role": "user", "content": "and 2?"}]
    for route in ("chat/completions", "messages"):
        stage.post(f"/v1/{route}", {"messages": history, "max_tokens": 9}, key)
        stage.assert_continued(letters)
        stage.sglang.requests.pop()


async def read_chat(stage: Stage, key: str) -> AsyncIterator[str]:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        async for chunk in stream:
            yield chunk.choices[0].delta.content or ""


async def read_messages(stage: Stage, key: str) -> AsyncIterator[str]:
    async with (
        AsyncAnthropic(base_url=stage.url, api_key=key) as client,
        client.messages.stream(
            model="m", max_tokens=900, messages=[{"role": "user", "content": QUESTION}]
        ) as stream,
    ):
        async for text in stream.text_stream:
            yield text


async def read_response(stage: Stage, key: str) -> AsyncIterator[str]:
    async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        async for event in stream:
            yield event.delta if event.type == "response.output_text.delta" else ""


READERS = pytest.mark.parametrize("read", [read_chat, read_messages, read_response])


@READERS
def test_a_client_that_hangs_up_stops_the_engine_and_loses_nothing_it_was_shown(
    stage: Stage, read: Reader
) -> None:
    stage.sglang.script = lambda request: TALKATIVE
    _, key = stage.open_session(TicketRef(1, 0))

    async def read_a_little() -> str:
        shown = ""
        async for text in (stream := read(stage, key)):
            shown += text
            if len(shown) > 20:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return shown

    shown = asyncio.run(read_a_little())
    (request,) = stage.sglang.requests
    (interaction,) = stage.await_journaled(key)
    assert stage.sglang.aborted == [request["rid"]]
    assert interaction.finish_reason == "abort"
    assert interaction.reply["content"].startswith(shown)
    assert len(interaction.reply["content"]) < MUCH_CHARS


@READERS
def test_a_stream_lost_while_it_speaks_ends_with_an_error(stage: Stage, read: Reader) -> None:
    faults = iter(["late_hang_up:1"])
    odd = [("1.1", 0, 5)]  # not what the relay says: nobody can go on from such tokens
    stage.sglang.script = lambda request: Script(fault=next(faults, ""), versions=odd)
    _, key = stage.open_session(TicketRef(1, 0))

    async def read_all() -> None:
        async for _ in read(stage, key):
            pass

    with pytest.raises((APIError, APIStatusError), match="lost"):
        asyncio.run(read_all())
    assert stage.post("/rl/end_session", {}, key).json()["interaction_count"] == 0
