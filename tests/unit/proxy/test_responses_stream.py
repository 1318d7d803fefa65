"""The stream of a Response while nothing is said: events, which Codex counts, and in order."""

import json

from areal_hpc.proxy.dialects.responses import RESPONSES_DIALECT, ResponsesRequest
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.sessions.events import SessionOpened
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.wire.proxy import StartSessionRequest
from tests.support.chatml import CHATML, byte_level_tokenizer


def test_a_response_that_is_waited_for_begins_in_the_silence() -> None:
    encoder = TokenEncoder(byte_level_tokenizer())
    model = ServedModel("m", ChatTemplate(CHATML), encoder, 100)
    session = Session(SessionOpened("s", b"k", StartSessionRequest("t")))
    asked = ResponsesRequest(input="hello", stream=True)
    exchange = RESPONSES_DIALECT.read(asked, session, model)
    said = b"".join(exchange.format_ping() for _ in range(3)).decode()
    told = [line.removeprefix("data: ") for line in said.split("\n") if line.startswith("data: ")]
    events = [json.loads(one) for one in told]
    assert [one["type"] for one in events] == [
        *("response.created", "response.in_progress"),
        *("keepalive", "keepalive"),
    ]
    assert [one["sequence_number"] for one in events] == [0, 1, 2, 3]
