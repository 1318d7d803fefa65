"""A request that repeats its history is read as if it had been read wholly."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.proxy.known_messages import KnownMessages
from areal_hpc.session.template import Message

Encode = Callable[[object], str]
contents = st.text(max_size=8) | st.sampled_from(['"messages":[', "]", "\\", "},{"])
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": contents})
encoders = st.sampled_from(
    [
        json.dumps,
        lambda value: json.dumps(value, indent=1),
        lambda value: msgspec.json.encode(value).decode(),
    ]
)


def body_of(
    encode: Encode, listed: list[Message], model_first: bool, extra: dict[str, Any]
) -> bytes:
    parts = {"model": "m", "messages": listed, **extra}
    if not model_first:
        parts = {"messages": parts.pop("messages"), **parts}
    return encode(parts).encode()


def read(known: KnownMessages, body: bytes) -> tuple[dict[str, Any], int]:
    """As a dialect does."""
    cut, before = known.cut(body)
    request = json.loads(cut)
    request["messages"] = [*before, *request["messages"]]
    known.keep(body, cut, request["messages"])
    return request, len(before)


@settings(max_examples=200, deadline=None)
@given(
    conversation=st.lists(messages, min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    encode=encoders,
    model_first=st.booleans(),
    extra=st.sampled_from([{}, {"seed": 1}, {"x": {"messages": []}}, {"tools": [{"messages": 1}]}]),
    other=messages,
)
def test_what_is_cut_and_known_is_the_whole(
    conversation: list[Message],
    lengths: list[int],
    encode: Encode,
    model_first: bool,
    extra: dict[str, Any],
    other: Message,
) -> None:
    known = KnownMessages()
    for number, length in enumerate(lengths):
        listed = conversation[:length]
        if number == 3:
            listed = [other, *listed]
        body = body_of(encode, listed, model_first, extra)
        assert read(known, body)[0] == json.loads(body)


@pytest.mark.parametrize("encode", [json.dumps, lambda value: msgspec.json.encode(value).decode()])
def test_a_longer_history_is_known_up_to_where_it_grew(encode: Encode) -> None:
    known = KnownMessages()
    listed = [{"role": "user", "content": "hi"}]
    for expected in (0, 1, 3):
        body = body_of(encode, listed, False, {"seed": 1})
        assert read(known, body)[1] == expected
        listed = [*listed, {"role": "assistant", "content": "so"}, {"role": "user", "content": "?"}]


def test_two_lists_of_messages_are_never_put_together() -> None:
    known = KnownMessages()
    first = b'{"messages":[{"role":"user","content":"a"}]}'
    read(known, first)
    twice = first[:-2] + b',{"role":"user","content":"b"}],"messages":[]}'
    assert read(known, twice) == ({"messages": []}, 0)
