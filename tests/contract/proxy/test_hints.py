"""Hints and unknown parameters change nothing and are counted; null is absence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.parameter_samples import ADD, CHAT_ADD, TOOL, body_with, with_tool
from tests.contract.proxy.talk import LEAST, ask_least, assert_refused, ignored
from tests.support.proxy_stage import Stage


@pytest.mark.parametrize("route", LEAST)
def test_null_is_absence_whatever_is_null(stage: Stage, route: str) -> None:
    dialect: Dialect = DIALECT_BY_ROUTE[route]
    known = {*dialect.request.__struct_fields__} - {*LEAST[route]}
    for name in ("sparkle", *sorted(known)):
        _, key = stage.open_session()
        ask_least(stage, key, route, **{name: None})


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/messages", {"thinking": {"type": "disabled", "display": None, "sparkle": None}}),
        ("/messages", {"output_config": {"format": None, "effort": None, "sparkle": None}}),
        ("/messages", with_tool("/messages", {**TOOL, "strict": None, "sparkle": None})),
        ("/messages", {"tool_choice": {"type": "none", "name": None, "sparkle": None}}),
        ("/messages", {"mcp_servers": []}),
        ("/responses", {"text": {"format": None, "verbosity": None, "sparkle": None}}),
        ("/responses", {"reasoning": {"effort": None, "summary": None, "sparkle": None}}),
        ("/responses", with_tool("/responses", {**ADD, "strict": None, "sparkle": None})),
        ("/responses", {"input": [{"type": None, "role": "user", "content": "hi", "id": None}]}),
        ("/chat/completions", {"stream": True, "stream_options": {"sparkle": None}}),
        ("/chat/completions", {"stream": True, "stream_options": {"include_usage": None}}),
        ("/chat/completions", {"modalities": ["text"]}),
    ],
)
def test_what_asks_for_nothing_is_neither_refused_nor_counted(
    stage: Stage, key: str, route: str, body: Mapping[str, Any]
) -> None:
    before = ignored(stage)
    ask_least(stage, key, route, **body)
    assert ignored(stage).keys() <= {*before, ("/messages", "thinking")}


UNKNOWN = [
    *((route, "sparkle") for route in DIALECT_BY_ROUTE),
    ("/messages", "output_config.sparkle"),
    ("/messages", "tools[].sparkle"),
    ("/responses", "reasoning.sparkle"),
    ("/responses", "text.sparkle"),
    ("/responses", "tools[].sparkle"),
]
"""Hints of the next release of a client."""


@pytest.mark.parametrize(("route", "name"), UNKNOWN)
def test_an_unknown_parameter_changes_nothing_and_is_counted(
    stage: Stage, route: str, name: str
) -> None:
    before = ignored(stage)
    sent = []
    for body in ({}, {**body_with(route, name, {"a": 1}), "empty": None}):
        stage.sglang.requests.clear()
        ask_least(stage, stage.open_session()[1], route, **body)
        (request,) = stage.sglang.requests
        sent.append({part: request[part] for part in ("input_ids", "sampling_params")})
    assert sent[0] == sent[1]
    assert ignored(stage) == {**before, (route, name): before.get((route, name), 0) + 1}


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [
        ("/chat/completions", "temprature", 1.0),
        ("/chat/completions", "max_token", 3),
        ("/messages", "top_p_", 0.5),
        ("/messages", "tools[].input_schemas", {}),
        ("/responses", "max_output_token", 3),
    ],
)
def test_what_looks_like_a_parameter_is_asked_about(
    stage: Stage, route: str, name: str, value: Any
) -> None:
    answer = stage.post(route, body_with(route, name, value), stage.open_session()[1])
    assert "did you mean " in assert_refused(answer, route, name)
    assert stage.sglang.requests == []


@pytest.mark.parametrize(
    ("route", "body"), [("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]})]
)
def test_routes_that_are_no_dialect_refuse_what_they_do_not_know(
    stage: Stage, key: str, route: str, body: dict[str, Any]
) -> None:
    assert_refused(stage.post(route, {**body, "sparkle": 1}, key), route, "sparkle")


@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("/chat/completions", "store_"),
        ("/responses", "prompt_cache_keys"),
        ("/messages", "service_tiers"),
    ],
)
def test_what_looks_like_a_hint_is_one(stage: Stage, route: str, name: str) -> None:
    ask_least(stage, stage.open_session()[1], route, **{name: "x"})
    assert ignored(stage)[route, name] >= 1


def test_a_recipe_may_have_unknown_parameters_refused(tmp_path: Path) -> None:
    strict = Stage(tmp_path, proxy={"unknown_parameters": "refuse"})
    try:
        for route, name in UNKNOWN:
            answer = strict.post(route, body_with(route, name, 1), strict.open_session()[1])
            assert_refused(answer, route, name)
        assert strict.sglang.requests == []
        assert ignored(strict) == {}
    finally:
        strict.close()


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


def test_a_recipe_names_the_tools_that_are_dropped(tmp_path: Path) -> None:
    own = Stage(tmp_path, proxy={"dropped_tools": ["computer_*"]})
    try:
        _, key = own.open_session()
        computer = {"type": "computer_20300101", "name": "computer", "display_width_px": 1}
        search = {"type": "web_search_20300101", "name": "web_search"}
        answer = own.post(
            "/messages", {**LEAST["/messages"], **with_tool("/messages", TOOL, computer)}, key
        )
        assert answer.headers["x-areal-dropped-tools"] == "computer_20300101"
        for tools in ([TOOL, search], [computer]):
            refused = own.post("/messages", {**LEAST["/messages"], "tools": tools}, key)
            assert_refused(refused, "/messages", f"tools[{len(tools) - 1}].type")
    finally:
        own.close()


def test_the_routes_describe_their_hints(stage: Stage) -> None:
    schemas = stage.http.get(f"{stage.url}/openapi.json").json()["components"]["schemas"]
    for dialect in DIALECT_BY_ROUTE.values():
        properties = schemas[dialect.request.__name__]["properties"].values()
        assert any(one.get("description") == "Accepted without effect." for one in properties)
