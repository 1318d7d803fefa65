"""An agent's key opens model calls; rewards, records and the end are its driver's to give."""

from typing import Any

import httpx
import pytest

from areal_hpc.wire.ledger import TicketRef
from tests.support.proxy_stage import Stage

CONTROL_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/rl/set_reward", {"reward": 1e6}),
    ("/rl/end_session", {}),
    ("/rl/record", {"interactions": []}),
]


def open_for_agent(stage: Stage, ref: TicketRef | None = None) -> dict[str, str]:
    """What a driver gets: the session, a key for its agent and one for itself."""
    more = {} if ref is None else {"ref": {"ticket_id": ref.ticket_id, "attempt": ref.attempt}}
    answer = stage.post("/rl/start_session", {"task_id": "task", "rights": "calls", **more})
    reply: dict[str, str] = answer.json()
    return reply


def call(stage: Stage, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return stage.http.post(f"{stage.url}{path}", json=body, headers={"x-api-key": key})


@pytest.mark.parametrize(("path", "body"), CONTROL_CALLS)
def test_the_key_of_an_agent_neither_rewards_nor_records_nor_ends(
    path: str, body: dict[str, Any], stage: Stage
) -> None:
    opened = open_for_agent(stage)
    assert stage.ask(opened["api_key"], "hi").status_code == 200
    refused = call(stage, opened["api_key"], path, body)
    assert refused.status_code == 403
    assert "rewards and the end need the control_key" in refused.text
    assert stage.ask(opened["api_key"], "hi").status_code == 200, "the session goes on"


def test_the_key_of_a_driver_rewards_and_ends_and_opens_no_model_calls(
    stage: Stage, ref: TicketRef
) -> None:
    opened = open_for_agent(stage, ref)
    assert stage.ask(opened["api_key"], "hi").status_code == 200
    assert stage.ask(opened["control_key"], "hi").status_code == 401
    stage.kill_proxy()
    stage.start_proxy()
    for path, body in (("/rl/set_reward", {"reward": 0.5}), ("/rl/end_session", {})):
        assert call(stage, opened["control_key"], path, body).status_code == 200
    assert call(stage, opened["control_key"], "/rl/record", {"interactions": []}).status_code == 403
    stage.finish_ticket(ref, opened["session_id"])
    assert stage.seal() == 1
    assert [ticket.rewards for ticket in stage.ledger.settled] == [[0.5]]
    for key in (opened["api_key"], opened["control_key"]):
        assert call(stage, key, "/rl/set_reward", {"reward": 1.0}).status_code == 401


@pytest.mark.parametrize("more", [{}, {"rights": "calls"}, {"rights": "all"}])
def test_an_agent_gets_calls_alone_of_the_admin_key_unless_more_is_asked(
    stage: Stage, more: dict[str, str]
) -> None:
    opened = stage.post("/rl/start_session", {"task_id": "task", **more}, stage.admin_key).json()
    key, control_key = opened["api_key"], opened.get("control_key", "")
    assert bool(control_key) == (more.get("rights") != "all")
    assert stage.ask(key, "hi").status_code == 200
    if control_key:
        assert call(stage, key, "/rl/set_reward", {"reward": 1.0}).status_code == 403
        assert call(stage, key, "/rl/end_session", {}).status_code == 403
    stage.finish_session(control_key or key, 1.0)
