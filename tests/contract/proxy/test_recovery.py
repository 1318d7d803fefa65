"""No interaction or ticket is lost, doubled or trained twice by kill -9, restarts or repeats."""

import contextlib
import itertools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from areal_hpc.shards.schema import PARTIAL_SUFFIX
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import FinishTicketRequest
from tests.contract.proxy.talk import LEAST, QUESTION, turn
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import CELL, Script
from tests.support.waiting import wait_for

REF = TicketRef(7, 2)


def finish_ticket(stage: Stage, ref: TicketRef, *texts: str) -> None:
    """Finish a ticket of one session with one call."""
    session_id, key = stage.open_session(ref)
    for text in texts or ("hi",):
        assert stage.ask(key, text, logprobs=True).status_code == 200
    stage.finish_session(key, 1.0)
    stage.finish_ticket(ref, session_id)


def test_a_finished_ticket_is_sealed_as_said_and_settled(stage: Stage, ref: TicketRef) -> None:
    stage.sglang.script = lambda request: Script(
        "hello world", versions=[("3.1", 0, 2), ("3.2", 2, 5)]
    )
    sessions = [stage.open_session(ref, episode=episode) for episode in range(2)]
    _, stray = stage.open_session(ref, episode=1)
    for reward, (_, key) in enumerate(sessions):
        assert stage.ask(key, "hi", temperature=0.5).status_code == 200
        stage.finish_session(key, float(reward))
    assert stage.finish_ticket(ref, *(session_id for session_id, _ in sessions)) == 2
    assert stage.ask(stray, "hi").status_code == 401
    assert stage.seal() == 1
    (settled,) = stage.ledger.settled
    assert (settled.ref, settled.rows, settled.rewards) == (ref, [0, 1], [0.0, 1.0])
    rows = stage.sealed_rows(ref)
    prompt = stage.sglang.requests[0]["input_ids"]
    for episode, row in enumerate(rows):
        assert row.input_ids_T.tolist()[: len(prompt)] == prompt
        assert row.loss_mask_T.tolist() == [0] * len(prompt) + [1] * 5
        versions = [-1] * len(prompt) + [3 << 32 | 1] * 2 + [3 << 32 | 2] * 3
        assert row.versions_T.tolist() == versions
        logprobs = [-0.5 - 0.001 * i for i in range(5)]
        assert np.allclose(row.logprobs_T[len(prompt) :], logprobs)
        assert (row.ticket_id, row.attempt, row.episode) == (ref.ticket_id, 2, episode)
        assert row.temperature == 0.5


def test_a_session_survives_kill_9_and_is_sealed_once(stage: Stage, ref: TicketRef) -> None:
    session_id, key = stage.open_session(ref)
    with stage.client(key) as client:
        client.chat.completions.create(model="m", messages=QUESTION)
        before = stage.url
        stage.kill_proxy()
        messages = [*QUESTION, *turn("hello world")]
        with ThreadPoolExecutor(1) as agent:
            second = agent.submit(client.chat.completions.create, model="m", messages=messages)
            time.sleep(0.3)
            stage.start_proxy()
            assert second.result(scaled(60)).choices[0].message.content == "hello world"
    assert stage.url == before
    first_ids, second_ids = (request["input_ids"] for request in stage.sglang.requests)
    assert second_ids[: len(first_ids)] == first_ids
    stage.finish_session(key, 1.0)
    assert stage.finish_ticket(ref, session_id) == 1
    stage.restart_proxy()
    assert stage.finish_ticket(ref, session_id) == 1
    assert [stage.seal(), stage.seal()] == [1, 0]
    stage.restart_proxy()
    assert stage.seal() == 0
    assert [ticket.rewards for ticket in stage.ledger.settled] == [[1.0]]
    (row,) = stage.sealed_rows(ref)
    assert row.input_ids_T.tolist()[: len(second_ids)] == second_ids
    assert row.loss_mask_T.sum() == 10


@pytest.mark.parametrize("has_index_line", [True, False])
def test_a_sealed_ticket_is_sealed_once(stage: Stage, ref: TicketRef, has_index_line: bool) -> None:
    finish_ticket(stage, ref)
    unsealed, index = stage.journal.read_bytes(), stage.paths.shard_index_dir / f"{CELL}.jsonl"
    indexed = index.read_bytes() if index.exists() else b""
    assert stage.seal() == 1
    (settled,) = [ticket for ticket in stage.ledger.settled if ticket.ref == ref]
    stage.kill_proxy()
    stage.journal.write_bytes(unsealed)  # as if it died before it could note the shard
    half_written = stage.paths.shards_dir / f"{CELL}-999999.h5{PARTIAL_SUFFIX}"
    half_written.touch()
    if not has_index_line:
        index.write_bytes(indexed)
    stage.start_proxy()
    assert stage.seal() == 0
    wait_for(lambda: stage.ledger.settled.count(settled) > 1)
    assert len(stage.sealed_rows(ref)) == 1
    assert not half_written.exists()


def test_sigterm_seals_what_is_finished_and_keeps_the_journal(own_stage: Stage) -> None:
    stage = own_stage
    finish_ticket(stage, REF)
    stage.sglang.script = lambda request: Script(gate=threading.Event())
    _, busy = stage.open_session(TicketRef(8, 0))
    call = stage.begin("/v1/chat/completions", {"messages": QUESTION}, busy)
    wait_for(lambda: len(stage.sglang.requests) == 2)
    stage.stop_proxy()  # the reply would never come
    call.close()
    assert [ticket.ref for ticket in stage.ledger.settled] == [REF]
    assert list(stage.journal_dir.glob("*/journal"))
    stage.start_proxy()
    stage.paths.finished_marker.touch()
    stage.stop_proxy()
    assert list(stage.journal_dir.iterdir()) == []


def test_a_small_ticket_is_sealed_by_its_age(small_stage: Stage) -> None:
    finish_ticket(small_stage, REF)
    wait_for(lambda: small_stage.ledger.settled)


SMALL = {
    "areal_hpc.proxy.sessions.recorder.MIN_COMPACTION_GROWTH_BYTES": 100_000,
    "areal_hpc.proxy.sessions.sealing.SEALED_SHARD_BYTES": 4096,
}


@pytest.mark.parametrize("own_stage", [{"constants": SMALL}], indirect=True)
def test_large_tickets_are_sealed_by_bytes_and_the_journal_forgets_them(own_stage: Stage) -> None:
    stage = own_stage
    open_id, open_key = stage.open_session(REF)
    stage.ask(open_key, "remember me")
    sizes = []
    for number in range(10):
        texts = ["x " * 990 + str(number), "é" * 900] * 4
        finish_ticket(stage, TicketRef(number, 0), *texts)
        wait_for(lambda: stage.ledger.settled)
        stage.ledger.settled.clear()
        stage.seal()  # returns when the journal has been rotated, if that was due
        sizes.append(stage.journal.stat().st_size)
    assert max(sizes) > 60_000
    assert any(after < before / 3 for before, after in itertools.pairwise(sizes)), sizes
    stage.restart_proxy()
    stage.finish_session(open_key, 1.0)
    assert stage.finish_ticket(REF, open_id) == 1


def test_only_tickets_that_can_be_trained_are_finished(stage: Stage, ref: TicketRef) -> None:
    first, key = stage.open_session(ref)
    other, _ = stage.open_session(REF)

    def status(*ids: str) -> int:
        return stage.post("/rl/finish_ticket", FinishTicketRequest(ref, [*ids])).status_code

    stage.ask(key, "hi")
    assert [status(), status("nobody"), status(other), status(first)] == [400, 404, 409, 409]
    stage.end_session(key)
    assert status(first) == 409  # no reward
    again, key = stage.open_session(ref)
    assert stage.post("/rl/set_reward", {"reward": 1.0}, key).status_code == 400  # no call
    reply = stage.ask(key, "hi").json()
    body = {"reward": 2.0, "interaction_id": reply["id"]}
    assert stage.post("/rl/set_reward", {**body, "interaction_id": "no"}, key).status_code == 400
    assert stage.post("/rl/set_reward", body, key).json() == {"interaction_id": reply["id"]}
    stage.end_session(key)
    assert stage.ask(key, "more").status_code == 403
    assert stage.post("/rl/set_reward", body, key).status_code == 403
    assert stage.finish_ticket(ref, again) == 1
    stage.end_session(key)


def test_a_filtered_ticket_is_forgotten_and_never_sealed(stage: Stage, ref: TicketRef) -> None:
    filtered, sealed = TicketRef(72, 0), ref
    _, key = stage.open_session(filtered)
    other, other_key = stage.open_session(sealed)
    for session_key in (key, other_key):
        stage.ask(session_key, "hi")
    discard = FinishTicketRequest(filtered, [], discard=True)
    for _ in range(2):  # repeating it is harmless
        assert stage.post("/rl/finish_ticket", discard).json() == {"rows": 0}
    assert stage.ask(key, "more").status_code == 401
    stage.restart_proxy()
    assert stage.ask(key, "more").status_code == 401
    stage.finish_session(other_key, 1.0)
    assert stage.finish_ticket(sealed, other) == 1
    refused = stage.post("/rl/finish_ticket", FinishTicketRequest(sealed, [], discard=True))
    assert refused.status_code == 409


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
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len({answer.headers["x-request-id"] for answer in answers}) == samples
    assert len({answer.content for answer in answers}) == samples
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


def test_a_stream_that_was_left_is_untrained_and_sampled_anew(stage: Stage, ref: TicketRef) -> None:
    session_id, key = stage.open_session(ref)
    stage.sglang.script = lambda request: Script("word " * 200, piece_delay_s=0.02)
    body, headers = LEAST["/chat/completions"], {"idempotency-key": "k"}
    with (
        contextlib.suppress(httpx.HTTPError),
        stage.stream("/v1/chat/completions", body, key, headers) as answer,
    ):
        next(answer.iter_bytes())
    wait_for(lambda: stage.sglang.aborted)
    stage.sglang.script = lambda request: Script()
    assert send(stage, key, stream=True, idempotency_key="k").status_code == 200
    assert count_trained_rows(stage, ref, session_id, key) == 1
