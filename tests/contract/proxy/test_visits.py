"""Online runs: a program that opens a session plays an episode of a waiting ticket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import AwaitSessionRequest, OfferRequest, StartSessionRequest
from tests.contract.proxy.proxy_stage import Stage

TASK = {"question": "What is 1 + 2?"}


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("online"))
    stage.stop_proxy()
    stage.configure({**stage.config, "online": True})
    stage.start_proxy()
    yield stage
    stage.close()


def offer(
    stage: Stage, pool: ThreadPoolExecutor, ticket_id: int, wait_s: float = 10.0
) -> Future[httpx.Response]:
    session = StartSessionRequest("train", TicketRef(ticket_id, 0))
    return pool.submit(stage.post, "/rl/offer_session", OfferRequest(session, TASK, wait_s))


def come(stage: Stage, **more: Any) -> httpx.Response:
    """What a program outside does, as with AReaL's proxy: repeat while there is no room."""
    while True:
        answer = stage.post("/rl/start_session", {"task_id": "mine", **more})
        if answer.status_code != 429:
            return answer


def test_a_program_plays_the_oldest_ticket_and_its_session_becomes_rows(online: Stage) -> None:
    with ThreadPoolExecutor(2) as pool:
        newer = offer(online, pool, 12)
        older = offer(online, pool, 11)
        time.sleep(0.5)  # both requests have arrived
        opened = come(online, api_key="sk-chosen-by-the-client").json()
        assert opened["task"] == TASK
        assert opened["api_key"] == "sk-chosen-by-the-client"
        assert older.result(10).json() == {"session_id": opened["session_id"]}
        assert not newer.done()
        come(online)
        assert newer.result(10).json()["session_id"]
    question = AwaitSessionRequest(opened["session_id"], 0.0)
    assert online.post("/rl/await_session", question).json() == {"ended": False, "reward": None}
    assert online.ask(opened["api_key"], "hi").status_code == 200
    online.finish_session(opened["api_key"], 0.5)
    assert online.post("/rl/await_session", question).json() == {"ended": True, "reward": 0.5}
    finished = {"ref": msgspec.to_builtins(TicketRef(11, 0)), "session_ids": [opened["session_id"]]}
    assert online.post("/rl/finish_ticket", finished).json() == {"rows": 1}


def test_nobody_opens_a_session_while_no_ticket_waits(online: Stage) -> None:
    answer = online.post("/rl/start_session", {"task_id": "mine"})
    assert (answer.status_code, "repeat" in answer.text) == (429, True)


def test_an_offer_that_nobody_takes_ends(online: Stage) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert offer(online, pool, 13, wait_s=0.2).result(5).json() == {"session_id": None}
    assert online.post("/rl/start_session", {"task_id": "mine"}).status_code == 429


def test_an_offer_whose_driver_left_is_not_given_away(online: Stage) -> None:
    request = OfferRequest(StartSessionRequest("train", TicketRef(14, 0)), TASK, 10.0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{online.url}/rl/offer_session",
            content=msgspec.json.encode(request),
            headers={"authorization": f"Bearer {online.admin_key}"},
            timeout=0.3,
            trust_env=False,
        )
    time.sleep(0.3)  # the proxy must have read that the connection has ended
    assert online.post("/rl/start_session", {"task_id": "mine"}).status_code == 429


def test_other_proxies_take_no_offers(stage: Stage) -> None:
    request = OfferRequest(StartSessionRequest("train", TicketRef(15, 0)), TASK, 0.0)
    assert stage.post("/rl/offer_session", request).status_code == 404
    assert stage.post("/rl/await_session", AwaitSessionRequest("no-such")).status_code == 404
