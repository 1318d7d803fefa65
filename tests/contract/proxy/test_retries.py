"""Two equal requests are two samples; what calls itself a repeat is trained once."""

import contextlib
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.talk import LEAST
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script
from tests.support.waiting import wait_for

ROUTES = {**LEAST, "/models/tiny:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]}}


def send(
    stage: Stage,
    key: str,
    route: str = "/chat/completions",
    /,
    stream: bool = False,
    **headers: Any,
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named |= {"x-goog-api-key": key} if "models" in route else {"authorization": f"Bearer {key}"}
    version = "/v1beta" if "models" in route else "/v1"
    body = ROUTES[route] | ({"stream": True} if stream else {})
    return stage.http.post(f"{stage.url}{version}{route}", json=body, headers=named)


def count_trained_rows(stage: Stage, ref: TicketRef, session_id: str, key: str) -> int:
    stage.finish_session(key, 1.0)
    return stage.finish_ticket(ref, session_id)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("first", "second", "samples", "rows"),
    [
        pytest.param({}, {}, 2, 2, id="a vote"),
        pytest.param({}, {"x_stainless_retry_count": "0"}, 2, 2, id="first tries"),
        pytest.param({}, {"x_stainless_retry_count": "1"}, 2, 1, id="a retry"),
        pytest.param({"idempotency_key": "k"}, {"idempotency_key": "k"}, 1, 1, id="a repeated key"),
        pytest.param({"idempotency_key": "k"}, {"idempotency_key": "l"}, 2, 2, id="two keys"),
    ],
)
def test_only_what_calls_itself_a_repeat_is_one(
    stage: Stage,
    ref: TicketRef,
    route: str,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    samples: int,
    rows: int,
) -> None:
    session_id, key = stage.open_session(ref)
    answers = [send(stage, key, route, **headers) for headers in (first, second)]
    assert [one.status_code for one in answers] == [200, 200]
    assert len({one.headers["x-request-id"] for one in answers}) == samples
    assert len({one.content for one in answers}) == samples
    assert len(stage.sglang.requests) == len(stage.journaled(key)) == samples
    assert count_trained_rows(stage, ref, session_id, key) == rows


def test_the_retry_of_a_refused_request_takes_no_votes_place(stage: Stage, ref: TicketRef) -> None:
    session_id, key = stage.open_session(ref)
    assert [send(stage, key).status_code for _ in range(2)] == [200, 200]
    stage.sglang.script = lambda request: Script(fault="400")
    assert send(stage, key, x_stainless_retry_count="0").status_code == 400
    stage.sglang.script = lambda request: Script()
    assert send(stage, key, x_stainless_retry_count="1").status_code == 200
    assert count_trained_rows(stage, ref, session_id, key) == 3


def test_a_stream_is_answered_from_the_stored_one(stage: Stage, key: str) -> None:
    first = send(stage, key, stream=True, idempotency_key="k")
    again = send(stage, key, stream=True, idempotency_key="k")
    assert again.headers["content-type"] == first.headers["content-type"] == "text/event-stream"
    assert (again.text, len(stage.sglang.requests)) == (first.text, 1)


def test_a_key_is_one_requests_and_one_sessions(stage: Stage, key: str) -> None:
    assert send(stage, key, idempotency_key="k").status_code == 200
    other = send(stage, key, "/responses", idempotency_key="k")
    assert (other.status_code, "another request" in other.text) == (400, True)
    _, stranger = stage.open_session()
    assert send(stage, stranger, idempotency_key="k").status_code == 200
    assert len(stage.sglang.requests) == 2


def test_a_failed_request_is_asked_again_under_its_key(stage: Stage, key: str) -> None:
    stage.sglang.script = lambda request: Script(fault="400")
    assert send(stage, key, idempotency_key="k").status_code == 400
    stage.sglang.script = lambda request: Script()
    assert send(stage, key, idempotency_key="k").status_code == 200


def test_a_stream_that_its_client_left_is_not_trained_and_is_sampled_anew(
    stage: Stage, ref: TicketRef
) -> None:
    session_id, key = stage.open_session(ref)
    stage.sglang.script = lambda request: Script("word " * 200, piece_delay_s=0.02)
    body: dict[str, Any] = {**LEAST["/chat/completions"], "stream": True}
    headers = {"authorization": f"Bearer {key}", "idempotency-key": "k"}
    with (
        contextlib.suppress(httpx.HTTPError),
        stage.http.stream(
            "POST", f"{stage.url}/v1/chat/completions", json=body, headers=headers
        ) as answer,
    ):
        next(answer.iter_bytes())
    wait_for(lambda: stage.sglang.aborted)
    stage.sglang.script = lambda request: Script()
    assert send(stage, key, stream=True, idempotency_key="k").status_code == 200
    assert count_trained_rows(stage, ref, session_id, key) == 1
