"""Parameters of each dialect are used, counted without effect, or refused."""

import json
from typing import Any

import httpx
import pytest

from areal_hpc.proxy.dialects.parameters import REFUSED_SAMPLING_OF_OTHER_ENGINES
from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.parameter_samples import (
    ADD,
    CHAT_ADD,
    HINTS,
    REFUSED,
    TOOL,
    body_with,
    body_without,
    with_tool,
)
from tests.contract.proxy.talk import LEAST, QUESTION, ask_least, assert_refused, chunks_of, ignored
from tests.support.parameter_table import (
    get_refusal_by_param,
    list_effective_params,
    list_ignored_params_of,
)
from tests.support.proxy_stage import Stage


def sent(stage: Stage, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's request for a request with further fields."""
    stage.sglang.requests.clear()
    ask_least(stage, stage.open_session()[1], route, **body)
    (request,) = stage.sglang.requests
    return {part: request[part] for part in ("input_ids", "sampling_params")}


@pytest.mark.parametrize("route", DIALECT_BY_ROUTE)
def test_a_hint_changes_nothing_and_is_counted(stage: Stage, route: str) -> None:
    for name, value in HINTS[route].items():
        plain = sent(stage, route, body_without(route, name))
        before, note = ignored(stage), f" {route}: {name!r} has no effect here"
        assert sent(stage, route, body_with(route, name, value)) == plain, name
        counts = ignored(stage)
        assert counts[route, name] == before.get((route, name), 0) + 1
        assert {*counts} - {*before} <= {(route, name), (route, name.partition(".")[0])}
        # Logged once for each client and process, which other tests start anew or used before.
        assert note in stage.log


@pytest.mark.parametrize("route", DIALECT_BY_ROUTE)
def test_what_would_change_a_reply_is_refused_with_the_way_out(stage: Stage, route: str) -> None:
    _, key = stage.open_session()
    refusals_of_dialect = get_refusal_by_param(DIALECT_BY_ROUTE[route].request)
    refusals = {**REFUSED_SAMPLING_OF_OTHER_ENGINES, **refusals_of_dialect}
    for name, value in REFUSED[route].items():
        answer = stage.post(route, body_with(route, name, value), key)
        message = assert_refused(answer, route, name)
        assert "would change the reply" in message
        assert message.endswith(f"({refusals[name].way_out})")
    assert stage.sglang.requests == []


@pytest.mark.parametrize("route", DIALECT_BY_ROUTE)
def test_what_asks_for_nothing_is_neither_refused_nor_counted(stage: Stage, route: str) -> None:
    """Send null for every nullable field, and harmless values of refused fields, all at once."""
    before = ignored(stage)
    form = DIALECT_BY_ROUTE[route].request
    least = ask_least(stage, stage.open_session()[1], route).request.content
    refusals = {**REFUSED_SAMPLING_OF_OTHER_ENGINES, **get_refusal_by_param(form)}
    names = {*form.__struct_fields__, *refusals, "sparkle"}
    nulls = {name: None for name in names if f'"{name}"'.encode() not in least}
    inert = refusals.keys() - {*list_effective_params(form)}
    harmless = {name: refusals[name].harmless[0] for name in inert if refusals[name].harmless}
    for body in (nulls, harmless):
        ask_least(stage, stage.open_session()[1], route, **body)
    assert ignored(stage) == before


def test_fields_of_a_reply_that_come_back_with_it_change_nothing(stage: Stage) -> None:
    """Send all fields that the document lists as `messages[].NAME` at once."""
    letters, before, prompts = stage.speak_in_letters(), ignored(stage), []
    form = DIALECT_BY_ROUTE["/chat/completions"].request
    inside = [name for name in list_ignored_params_of(form) if name.startswith("messages[].")]
    assert len(inside) >= 8
    for fields in ({}, {name.removeprefix("messages[]."): ["as it came"] for name in inside}):
        stage.sglang.requests.clear()
        _, key = stage.open_session()
        history = [*QUESTION, {"role": "assistant", "content": "hello", **fields}, *QUESTION]
        for messages in (QUESTION, history):
            assert stage.chat(key, messages).status_code == 200
        stage.assert_continued(letters)
        prompts.append(stage.sglang.requests[-1]["input_ids"])
    assert prompts[0] == prompts[1]
    assert ignored(stage) == before


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
    ask_least(stage, key, "/messages", service_tier="auto", metadata={"user_id": "u"}, sparkle=1)
    stage.finish_session(key, 1.0)
    stage.finish_ticket(ref, session_id)
    stage.seal()
    for row in stage.sealed_rows(ref):
        assert row.record.ignored == {"truncation": 1, "sparkle": 2, "service_tier": 1}


SCHEMA = {"type": "object"}


@pytest.mark.parametrize("route", LEAST)
def test_a_session_may_hold_its_agent_to_the_recipes_sampling(stage: Stage, route: str) -> None:
    own: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    sampling = {"temperature": 0, "top_p": 0.1} | ({} if route == "/responses" else {"top_k": 1})
    before, reply = ignored(stage), {}
    for rule in ("agent", "recipe"):
        _, key = stage.open_session(sampling_from=rule, **own)
        reply = ask_least(stage, key, route, **sampling).json()
    by_agent, by_recipe = (request["sampling_params"] for request in stage.sglang.requests)
    assert {name: by_recipe[name] for name in own} == own
    assert {name: by_agent.get(name) for name in sampling} == sampling
    new = {name for where, name in ignored(stage) if where == route}
    assert {*sampling} <= new
    assert sum(ignored(stage).values()) == sum(before.values()) + len(sampling)
    if route == "/responses":
        assert (reply["temperature"], reply["top_p"]) == (0.7, 0.9)


def test_vllms_names_reach_the_engine_under_its_own(stage: Stage, key: str) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"min_tokens": 9, "max_tokens": 4}, {"min_new_tokens": 4}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"guided_json": SCHEMA}, {"json_schema": '{"type":"object"}'}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"guided_regex": "[0-9]"}, {"regex": "[0-9]"}),
        ({"guided_choice": ["yes", 'a "no"']}, {"ebnf": 'root ::= "yes" | "a \\"no\\""'}),
        ({"structured_outputs": {"choice": ["a"]}}, {"ebnf": 'root ::= "a"'}),
        ({"guided_json": None, "guided_choice": []}, {}),
    ]
    for number, (request, expected) in enumerate(cases):
        ask_least(stage, key, ("/chat/completions", "/completions")[number % 2], **request)
        params = stage.sglang.requests[-1]["sampling_params"]
        names = {"json_schema", "regex", "ebnf", "min_new_tokens", "ignore_eos"}
        assert {name: params[name] for name in names & params.keys()} == expected, request


def test_a_seed_of_64_bits_is_folded(stage: Stage, key: str) -> None:
    for seed, seed_of_engine in ((7, 7), (-5, -5), (2**63 - 1, 2**30 - 1), (2**63 - 1, 2**30 - 1)):
        ask_least(stage, key, "/chat/completions", seed=seed)
        assert stage.sglang.requests.pop()["sampling_params"]["sampling_seed"] == seed_of_engine


def test_a_temperature_greedy_to_the_engine_is_recorded_as_0(stage: Stage, key: str) -> None:
    for sampled, recorded in ((1e-300, 0.0), (9e-7, 0.0), (1e-6, 1e-6)):
        ask_least(stage, key, "/chat/completions", temperature=sampled)
        assert stage.sglang.requests[-1]["sampling_params"]["temperature"] == recorded
        interaction = stage.journaled(key)[-1]
        assert interaction.temperature == recorded
        assert json.loads(interaction.sampling)["temperature"] == recorded


@pytest.mark.parametrize("route", ["/chat/completions", "/completions"])
def test_token_ids_are_returned_when_they_are_asked_for(stage: Stage, route: str) -> None:
    letters = stage.speak_in_letters()
    _, key = stage.open_session()
    body = dict(LEAST[route])

    def ids_of(answer: httpx.Response) -> dict[str, Any]:
        ends = [answer.json()] if not body.get("stream") else chunks_of(answer)
        choice = ends[-1]["choices"][0]
        return {name: choice.get(name) for name in ("prompt_token_ids", "token_ids")}

    for streams in (False, True):
        body |= {"return_token_ids": True, "stream": streams}
        returned = ids_of(ask_least(stage, key, route, **body))
        prompt = stage.sglang.requests[-1]["input_ids"]
        assert returned == {"prompt_token_ids": prompt, "token_ids": letters}
        if route == "/chat/completions":  # also of a prompt that continues recorded tokens
            later_turns = [{"role": "assistant", "content": "hello"}, *QUESTION]
            body["messages"] = [*body["messages"], *later_turns]
    del body["stream"]
    assert ids_of(ask_least(stage, key, route, stream=False)) == {
        "prompt_token_ids": None,
        "token_ids": None,
    }
