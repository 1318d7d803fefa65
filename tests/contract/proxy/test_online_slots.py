"""Online runs: a program that opens a session plays an episode of a waiting ticket."""

import http.client
import select
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import (
    AwaitSessionEndRequest,
    OfferEpisodeReply,
    OfferEpisodeRequest,
    StartSessionRequest,
)
from tests.support.proxy_stage import Stage

TASK = {"question": "What is 1 + 2?"}


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("online"), online=True)
    yield stage
    stage.close()


def offer(stage: Stage, ticket_id: int, wait_s: float = 60.0) -> http.client.HTTPConnection:
    """A driver's offer, which waits at the proxy on return."""
    session = StartSessionRequest("train", TicketRef(ticket_id, 0))
    return stage.begin("/rl/offer_episode", OfferEpisodeRequest(session, TASK, wait_s))


def taken_by(offered: http.client.HTTPConnection) -> str | None:
    """The session that plays what was offered, as soon as there is one; None if nobody came."""
    reply = msgspec.json.decode(offered.getresponse().read(), type=OfferEpisodeReply)
    offered.close()
    return reply.session_id


def is_answered(offered: http.client.HTTPConnection) -> bool:
    return bool(select.select([offered.sock], [], [], 0)[0])


def come(stage: Stage, **more: Any) -> httpx.Response:
    """What a program outside does, as with AReaL's proxy: repeat while there is no room."""
    while True:
        answer = stage.post("/rl/start_session", {"task_id": "mine", **more})
        if answer.status_code != 429:
            return answer


def test_a_program_plays_the_oldest_ticket_and_its_session_becomes_rows(online: Stage) -> None:
    newer, older = offer(online, 12), offer(online, 11)
    opened = come(online, api_key="sk-chosen-by-the-client").json()
    assert opened["task"] == TASK
    assert opened["api_key"] == "sk-chosen-by-the-client"
    assert taken_by(older) == opened["session_id"]
    assert not is_answered(newer)
    come(online)
    assert taken_by(newer)
    question = AwaitSessionEndRequest(opened["session_id"], 0.0)
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
    assert taken_by(offer(online, 13, wait_s=0.2)) is None
    assert online.post("/rl/start_session", {"task_id": "mine"}).status_code == 429


def test_an_offer_whose_driver_left_is_not_given_away(online: Stage) -> None:
    offer(online, 14).close()
    online.catch_up()
    assert online.post("/rl/start_session", {"task_id": "mine"}).status_code == 429


def test_other_proxies_take_no_offers(stage: Stage) -> None:
    request = OfferEpisodeRequest(StartSessionRequest("train", TicketRef(15, 0)), TASK, 0.0)
    assert stage.post("/rl/offer_episode", request).status_code == 404
    assert stage.post("/rl/await_session", AwaitSessionEndRequest("no-such")).status_code == 404
