"""What an engine says of a call that it did not answer: wrong, to be tried elsewhere, failed."""

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
def test_an_abort_means_what_its_status_says_streamed_or_not(
    code: int, expected: type[Exception]
) -> None:
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
