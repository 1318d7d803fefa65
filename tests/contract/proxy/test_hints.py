"""Hints and unknown parameters change nothing and are counted; null is absence."""

from typing import Any

import pytest

from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.parameter_samples import ADD, CHAT_ADD, TOOL, body_with, with_tool
from tests.contract.proxy.talk import LEAST, ask_least, assert_refused, ignored
from tests.support.proxy_stage import Stage


def test_nested_nulls_are_neither_refused_nor_counted(stage: Stage) -> None:
    nothing: list[tuple[str, dict[str, Any]]] = [
        ("/messages", {"thinking": {"type": "disabled", "display": None, "sparkle": None}}),
        ("/messages", {"tool_choice": {"type": "none", "name": None, "sparkle": None}}),
        ("/messages", with_tool("/messages", {**TOOL, "strict": None, "sparkle": None})),
        ("/responses", {"text": {"format": None, "verbosity": None, "sparkle": None}}),
        ("/responses", {"input": [{"type": None, "role": "user", "content": "hi", "id": None}]}),
        ("/chat/completions", {"stream": True, "stream_options": {"include_usage": None}}),
    ]
    before = ignored(stage)
    for route, body in nothing:
        ask_least(stage, stage.open_session()[1], route, **body)
    assert ignored(stage).keys() <= {*before, ("/messages", "thinking")}


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


def test_what_looks_like_a_hint_is_one(stage: Stage, key: str) -> None:
    ask_least(stage, key, "/responses", prompt_cache_keys="x")
    assert ignored(stage)["/responses", "prompt_cache_keys"] >= 1


def test_each_client_that_gives_a_hint_is_told_of_once(stage: Stage, key: str) -> None:
    def ask(client: str, name: str) -> None:
        headers = {"x-api-key": key, "user-agent": client}
        body = {**LEAST["/responses"], name: "x"}
        assert stage.http.post(f"{stage.url}/responses", json=body, headers=headers).is_success

    for client in ("first/1.0", "second/2.0", "first/1.0"):
        ask(client, "glitter")
    lines = [line for line in stage.log.splitlines() if "glitter" in line]
    assert ["first/1.0" in line for line in lines] == [True, False]
    assert "second/2.0" in lines[1]


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


def test_the_routes_describe_their_hints(stage: Stage) -> None:
    schemas = stage.http.get(f"{stage.url}/openapi.json").json()["components"]["schemas"]
    for dialect in DIALECT_BY_ROUTE.values():
        properties = schemas[dialect.request.__name__]["properties"].values()
        assert any(one.get("description") == "Accepted without effect." for one in properties)
