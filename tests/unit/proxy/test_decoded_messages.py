"""A session decodes each message once, and remembers a bounded part of messages and requests."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.http.repeated_requests import (
    MAX_KEPT_ANSWER_BYTES_PER_SESSION,
    MAX_KEPT_REQUESTS_PER_SESSION,
    Answer,
    SessionRequests,
)
from areal_hpc.proxy.sessions.decoded_messages import MAX_REMEMBERED_BYTES, DecodedMessages

MESSAGES = [{"role": "user", "content": f'{i} "messages": [ }} é'} for i in range(6)]
ENCODERS = pytest.mark.parametrize(
    "encode", [msgspec.json.encode, lambda body: json.dumps(body).encode()]
)
Encode = Callable[[dict[str, Any]], bytes]


class Request(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: str = ""


class Session:
    """Session that decodes bodies; `read` has the decoded parts of each."""

    def __init__(self) -> None:
        self.latest, self.read = DecodedMessages(), list[bytes]()

    def ask(self, body: bytes) -> list[dict[str, Any]]:
        request: Request = self.latest.decode_body(body, self._decode)
        return self.latest.normalize(request.messages, lambda message, i: {**message, "place": i})

    def _decode(self, body: bytes) -> Request:
        self.read.append(body)
        try:
            return msgspec.json.decode(body, type=Request)
        except msgspec.ValidationError as error:
            raise ProxyRequestError(400, str(error)) from error


def number(messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [{**message, "place": i} for i, message in enumerate(messages)]


@ENCODERS
def test_only_what_is_new_is_decoded_and_normalized(encode: Encode) -> None:
    session = Session()
    first = session.ask(encode({"model": "m", "messages": MESSAGES[:2], "stream": False}))
    second = session.ask(encode({"model": "m", "messages": MESSAGES[:5], "stream": False}))
    assert second == number(MESSAGES[:5])
    assert all(message is other for message, other in zip(first, second, strict=False))
    assert b"0 " not in session.read[1]
    assert b"4 " in session.read[1]


@ENCODERS
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_history_that_does_not_go_on_is_decoded_whole(encode: Encode, count: int) -> None:
    session = Session()
    session.ask(encode({"messages": MESSAGES[:3]}))
    other = [*MESSAGES[:count], {"role": "user", "content": "another"}][:3]
    assert session.ask(encode({"messages": other})) == number(other)


def test_of_a_key_that_is_given_twice_the_last_one_counts() -> None:
    session = Session()
    session.ask(b'{"messages":[{"a":"1"}]}')
    assert session.ask(b'{"messages":[{"a":"1"},{"a":"2"}],"messages":[{"a":"3"}]}') == [
        {"a": "3", "place": 0}
    ]
    assert session.ask(b'{"messages":[{"a":"1"},{"a":"2"}]}') == [
        {"a": "1", "place": 0},
        {"a": "2", "place": 1},
    ]


def test_an_error_names_the_place_in_the_whole() -> None:
    session = Session()
    session.ask(b'{"messages":[{"a":"1"}]}')
    with pytest.raises(ProxyRequestError, match=r"messages\[1\]"):
        session.ask(b'{"messages":[{"a":"1"},2]}')


HALF = MAX_KEPT_ANSWER_BYTES_PER_SESSION // 2 + 1


class Client:
    """Client of a server that answers each key with that many bytes, or refuses."""

    def __init__(self) -> None:
        self.requests = SessionRequests()
        self.samples = 0

    async def ask(self, key: str, size_bytes: int = 1) -> None:
        async def answer(is_retry: bool, keeps_content: bool) -> Answer:
            if not size_bytes:
                raise ProxyRequestError(503, "busy")
            self.samples += 1
            return Answer(b"x" * size_bytes, "text/plain", [])

        headers = {b"idempotency-key": key.encode()}
        await self.requests.answer_once(headers, key.encode, answer)


@pytest.mark.asyncio
@pytest.mark.parametrize("size_bytes", [0, 1, HALF])
async def test_the_oldest_keys_are_forgotten(size_bytes: int) -> None:
    client = Client()
    await client.ask("first", max(1, size_bytes))
    await client.ask("first")
    assert client.samples == 1
    for number in range(1 if size_bytes == HALF else MAX_KEPT_REQUESTS_PER_SESSION):
        if size_bytes:
            await client.ask(str(number), size_bytes)
        else:
            with pytest.raises(ProxyRequestError):
                await client.ask(str(number), 0)
    before = client.samples
    await client.ask("first")
    assert client.samples == before + 1


def test_a_list_behind_the_repeated_one_counts_as_it_does_for_json() -> None:
    session = Session()
    body = json.dumps({"messages": MESSAGES[:2]}).encode()
    session.ask(body)
    twice = body[:-1] + b', "mess\\u0061ges": ' + json.dumps(MESSAGES[2:3]).encode() + b"}"
    assert session.ask(twice) == number(json.loads(twice)["messages"]) == number(MESSAGES[2:3])


def test_a_conversation_that_outgrows_the_bound_is_decoded_whole() -> None:
    session, long = Session(), {"role": "user", "content": "x" * (MAX_REMEMBERED_BYTES * 2 // 3)}
    body = b""
    for count in (1, 2, 3):
        body = json.dumps({"messages": [long] * count}).encode()
        assert session.ask(body) == number([long] * count)
        assert len(session.latest._beginning) <= MAX_REMEMBERED_BYTES
    assert session.read[-1] == body
