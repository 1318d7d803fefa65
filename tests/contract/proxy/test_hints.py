"""Hints and unknown parameters change nothing and are counted; null is absence."""

from typing import Any

import pytest

from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.parameter_samples import ADD, CHAT_ADD, TOOL, body_with, with_tool
from tests.contract.proxy.talk import ask_least, assert_refused
from tests.support.proxy_stage import Stage


def test_what_looks_like_a_parameter_is_asked_about(stage: Stage, key: str) -> None:
    misspelled: list[tuple[str, str, Any]] = [
        ("/chat/completions", "temprature", 1.0),
        ("/messages", "tools[].input_schemas", {}),
        ("/responses", "max_output_token", 3),
    ]
    for route, name, value in misspelled:
        answer = stage.post(route, body_with(route, name, value), key)
        assert "did you mean " in assert_refused(answer, route, name)
    assert stage.sglang.requests == []


def test_routes_that_are_no_dialect_refuse_what_they_do_not_know(stage: Stage, key: str) -> None:
    for route, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]})):
        assert_refused(stage.post(route, {**body, "sparkle": 1}, key), route, "sparkle")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "hosted"),
    [
        ("/chat/completions", {"type": "web_search_2030"}),
        ("/messages", {"type": "web_search_20300101", "name": "web_search", "max_uses": 3}),
        ("/responses", {"type": "image_generation"}),
    ],
)
def test_dropped_tools_are_named_to_the_client_and_in_the_export(
    stage: Stage, route: str, hosted: dict[str, Any], stream: bool
) -> None:
    session_id, key = stage.open_session()
    tool = {"/messages": TOOL, "/responses": ADD}.get(route, CHAT_ADD)
    body = {**with_tool(route, tool, hosted, hosted), "stream": stream, "sparkle": 1}
    for _ in range(2):
        answer = ask_least(stage, key, route, **body)
        assert answer.headers["x-areal-dropped-tools"] == hosted["type"]
    assert "x-areal-dropped-tools" not in ask_least(stage, key, route).headers
    stage.finish_session(key, 1.0)
    exported = stage.post("/export_trajectories", {"session_id": session_id}).json()
    assert exported["ignored"] == {f"tools[{hosted['type']}]": 2, "sparkle": 2}


def test_what_had_no_effect_is_in_the_record_of_the_rows(stage: Stage, ref: TicketRef) -> None:
    session_id, key = stage.open_session(ref)
    ask_least(stage, key, "/responses", truncation="auto", sparkle=1)
    ask_least(stage, key, "/messages", metadata={"user_id": "u"}, sparkle=1)
    stage.finish_session(key, 1.0)
    stage.finish_ticket(ref, session_id)
    stage.seal()
    for row in stage.sealed_rows(ref):
        assert row.record.ignored == {"truncation": 1, "sparkle": 2, "metadata": 1}
