"""An engine's errors keep the meaning of their codes; a session's home is chosen by load."""

from typing import Any

import msgspec
import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.engine.generation import (
    ChunkReader,
    EngineResponseError,
    UnfinishedEngineCallError,
    decode_generation,
)
from areal_hpc.proxy.engine.router import choose_home_replica

SERVER = "http://engine"
OUTCOMES = pytest.mark.parametrize(
    ("code", "expected"),
    [(400, ProxyRequestError), (500, EngineResponseError), (503, UnfinishedEngineCallError)],
)


def build_aborted_reply(code: int) -> bytes:
    reason = {"type": "abort", "message": "no memory", "status_code": code}
    meta: dict[str, Any] = {"finish_reason": reason, "completion_tokens": 0}
    return msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta})


@OUTCOMES
def test_an_abort_means_what_its_status_says(code: int, expected: type[Exception]) -> None:
    reply = build_aborted_reply(code)
    with pytest.raises(expected, match="no memory") as whole:
        decode_generation(SERVER, reply)
    with pytest.raises(expected, match="no memory") as streamed:
        ChunkReader(SERVER, ()).read_event(reply)
    assert whole.type is streamed.type is expected


@OUTCOMES
def test_an_error_event_means_what_its_code_says(code: int, expected: type[Exception]) -> None:
    event = msgspec.json.encode({"error": {"message": "no memory", "code": code}})
    with pytest.raises(expected, match="no memory") as raised:
        ChunkReader(SERVER, ()).read_event(event)
    assert raised.type is expected


@pytest.mark.parametrize(
    ("load", "together", "home"),
    [
        ({}, {}, 0),
        ({0: 1}, {}, 1),
        ({0: 12, 1: 10}, {0: 3}, 0),
        ({0: 13, 1: 10}, {0: 3}, 1),
        ({0: 10, 1: 10}, {0: 3, 1: 4}, 1),
        ({0: 10, 1: 10}, {0: 3, 1: 3}, 0),
    ],
)
def test_what_a_session_knows_is_preferred_where_the_load_is_even(
    load: dict[int, int], together: dict[int, int], home: int
) -> None:
    assert choose_home_replica([0, 1], load, together) == home


def test_only_replicas_that_may_be_asked_are_chosen() -> None:
    assert choose_home_replica([2, 3], {2: 5, 3: 4}, {0: 9}) == 3
