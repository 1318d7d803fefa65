"""What a request repeats of the one before is found by its bytes, and means what it says."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.sessions.repeated_messages import RepeatedMessages

MESSAGES = [{"role": "user", "content": f'{i} "messages": [ }} é'} for i in range(6)]
ENCODERS = pytest.mark.parametrize(
    "encode", [msgspec.json.encode, lambda body: json.dumps(body).encode()]
)
Encode = Callable[[dict[str, Any]], bytes]


class Request(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: str = ""


class Session:
    """Decodes the bodies of one session; `read` has what was decoded of each."""

    def __init__(self) -> None:
        self.latest, self.read = RepeatedMessages(), list[bytes]()

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
    more = session.ask(encode({"model": "m", "messages": MESSAGES[:5], "stream": False}))
    assert more == number(MESSAGES[:5])
    assert all(one is other for one, other in zip(first, more, strict=False))
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
