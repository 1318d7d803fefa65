"""Hints and unknown parameters change nothing and are counted; null is absence."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.http.app import DIALECT_BY_ROUTE
from tests.contract.proxy.talk import LEAST, ask_least
from tests.support.proxy_stage import Stage

DOCUMENT = Path(__file__).parents[3] / "docs" / "dialects.md"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
HINTS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "7"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "reasoning_effort": "xhigh",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": True,
        "user": "u",
        "verbosity": "high",
    },
    "/completions": {"user": "u"},
    "/messages": {
        "betas": ["b-2026-01-01"],
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "metadata": {"user_id": "u"},
        "output_config.effort": "max",
        "service_tier": "batch",
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "updates"},
        "tools[].cache_control": {"type": "ephemeral"},
        "tools[].defer_loading": True,
        "tools[].eager_input_streaming": True,
    },
    "/responses": {
        "client_metadata": {"a": "b"},
        "context_management": [{"type": "compaction"}],
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "reasoning.effort": "low",
        "reasoning.generate_summary": "concise",
        "reasoning.summary": "detailed",
        "safety_identifier": "s",
        "service_tier": "flex",
        "text.verbosity": "high",
        "tools[].defer_loading": True,
        "tools[image_generation]": {"type": "image_generation"},
        "tools[tool_search]": {"type": "tool_search", "execution": "client"},
        "tools[web_search]": {"type": "web_search", "external_web_access": False},
        "tools[web_search_preview]": {"type": "web_search_preview_2025_03_11"},
        "truncation": "auto",
    },
}
"""A value of each hint."""
NAMED = [(route, name) for route, hints in HINTS.items() for name in hints]


def body_with(route: str, name: str, value: Any) -> dict[str, Any]:
    """A request that gives one parameter more, wherever that stands."""
    outer, _, inner = name.partition(".")
    if not outer.startswith("tools["):
        return {**LEAST[route], outer: {inner: value} if inner else value}
    tool = TOOL if route == "/messages" else ADD
    tools = [{**tool, inner: value}] if inner else [tool, value]
    return {**LEAST[route], **with_tool(route, *tools)}


def with_tool(route: str, *tools: Mapping[str, Any]) -> dict[str, Any]:
    """Tools that are not for this model, which has no tool-call parser."""
    return {"tools": tools, "tool_choice": {"type": "none"} if route == "/messages" else "none"}


def ignored(stage: Stage) -> dict[tuple[str, str], int]:
    """How often each parameter was taken without effect."""
    text = stage.http.get(f"{stage.url}/metrics").text
    pattern = r'areal_hpc_proxy_ignored_parameters_total\{parameter="(.+)",route="(.+)"\} (\d+)'
    return {(route, name): int(count) for name, route, count in re.findall(pattern, text)}


@pytest.mark.parametrize(("route", "name"), NAMED)
def test_a_hint_changes_nothing_and_is_counted(stage: Stage, route: str, name: str) -> None:
    before, note = ignored(stage), f" {route}: {name} has no effect here"
    noted = stage.log.count(note)
    sent = []
    for body in ({}, body_with(route, name, HINTS[route][name])):
        stage.sglang.requests.clear()
        ask_least(stage, stage.open_session()[1], route, **body)
        (request,) = stage.sglang.requests
        sent.append({part: request[part] for part in ("input_ids", "sampling_params")})
    assert sent[0] == sent[1]
    assert ignored(stage) == {**before, (route, name): before.get((route, name), 0) + 1}
    # Once a process, which other tests start anew, or have told before.
    assert 1 <= stage.log.count(note) <= noted + 1


def test_the_document_names_every_hint() -> None:
    rows = re.findall(r"^\| `POST (/\S+)` \| (`.*`) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {route: sorted(re.findall(r"`(.+?)`", names)) for route, names in rows} == {
        route: sorted(hints) for route, hints in HINTS.items()
    }


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


def assert_refused(answer: httpx.Response, route: str, name: str) -> str:
    """By its name; the message."""
    assert answer.status_code == 400, answer.text
    error: dict[str, str] = answer.json()["error"]
    shown = error["message"].split(":")[0] if route == "/messages" else error["param"]
    assert shown == name.replace("[]", "[0]")
    return error["message"]


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
    ("route", "name"),
    [
        *(
            (route, name)
            for route in DIALECT_BY_ROUTE
            for name in ("guided_json", "min_tokens", "function_call")
        ),
        ("/chat/completions", "best_of"),
        ("/responses", "conversation"),
        ("/messages", "container"),
    ],
)
def test_what_would_change_a_reply_and_cannot_be_done_is_refused(
    stage: Stage, route: str, name: str
) -> None:
    answer = stage.post(route, body_with(route, name, 1), stage.open_session()[1])
    assert "would change the reply" in assert_refused(answer, route, name)
    assert stage.sglang.requests == []


@pytest.mark.parametrize(("route", "name"), [(route, "sparkle") for route in LEAST])
def test_routes_that_are_no_dialect_refuse_what_they_do_not_know(
    stage: Stage, route: str, name: str
) -> None:
    if route not in DIALECT_BY_ROUTE:
        answer = stage.post(route, body_with(route, name, 1), stage.open_session()[1])
        assert_refused(answer, route, name)


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


def test_tools_that_servers_of_anthropic_run_are_left_out_beside_others(stage: Stage) -> None:
    search = {"type": "web_search_20300101", "name": "web_search", "max_uses": 3}
    body = with_tool("/messages", TOOL, search)
    ask_least(stage, stage.open_session()[1], "/messages", **body)
    assert ignored(stage)["/messages", "tools[web_search]"] >= 1


def test_the_routes_describe_their_hints(stage: Stage) -> None:
    schemas = stage.http.get(f"{stage.url}/openapi.json").json()["components"]["schemas"]
    for dialect in DIALECT_BY_ROUTE.values():
        properties = schemas[dialect.request.__name__]["properties"].values()
        assert any(one.get("description") == "Accepted without effect." for one in properties)
