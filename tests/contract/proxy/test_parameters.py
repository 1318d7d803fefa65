"""Every parameter of every dialect: used, without effect, or refused with a way out."""

import re
from typing import Any

import pytest

from areal_hpc.proxy.dialects.parameter_docs import (
    get_refusal_by_param,
    list_effective_params,
    list_ignored_params_of,
)
from areal_hpc.proxy.dialects.refused_parameters import REFUSED_SAMPLING_OF_OTHER_ENGINES
from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from tests.contract.proxy.parameter_samples import (
    HINTS,
    REFUSED,
    USED,
    WISHES,
    body_with,
)
from tests.contract.proxy.talk import QUESTION, ask_least, assert_refused, ignored
from tests.support.proxy_stage import Stage


def every(samples: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Route and name of each."""
    return [(route, name) for route, named in samples.items() for name in named]


@pytest.mark.parametrize("route", DIALECT_BY_ROUTE)
def test_every_parameter_of_the_table_is_tried(route: str) -> None:
    form = DIALECT_BY_ROUTE[route].request
    assert {*USED[route]} == {*list_effective_params(form)}
    within = ("messages[]", "input[]", "tools[].tools[]", "thinking.")
    hints = {name for name in list_ignored_params_of(form) if not name.startswith(within)}
    assert {*HINTS[route]} == hints
    assert {*REFUSED[route]} == {
        *get_refusal_by_param(form),
        *REFUSED_SAMPLING_OF_OTHER_ENGINES,
    } - {*list_effective_params(form)}


def test_the_probed_parameters_are_all_known() -> None:
    """As many as a probe of three dialects once tried, and more."""
    known = {route: {*USED[route], *HINTS[route], *REFUSED[route]} for route in USED}
    assert len(known["/chat/completions"]) >= 54
    assert len(known["/responses"]) >= 24
    assert len(known["/messages"]) >= 19


@pytest.mark.parametrize(("route", "name"), every(USED))
def test_a_used_parameter_is_accepted(stage: Stage, route: str, name: str) -> None:
    before = ignored(stage)
    ask_least(stage, stage.open_session()[1], route, **body_with(route, name, USED[route][name]))
    vain = {(where, what) for (where, what) in ignored(stage) if where == route} - {*before}
    assert {what.partition(".")[0] for _, what in vain} <= {name}


@pytest.mark.parametrize(("route", "name"), [*every(HINTS), *every(WISHES)])
def test_a_hint_changes_nothing_and_is_counted(stage: Stage, route: str, name: str) -> None:
    before, note = ignored(stage), f" {route}: {name!r} has no effect here"
    noted = stage.log.count(note)
    value = (HINTS[route] | WISHES[route])[name]
    sent = []
    for body in ({}, body_with(route, name, value)):
        stage.sglang.requests.clear()
        ask_least(stage, stage.open_session()[1], route, **body)
        (request,) = stage.sglang.requests
        sent.append({part: request[part] for part in ("input_ids", "sampling_params")})
    assert sent[0] == sent[1]
    found = ignored(stage)
    assert found[route, name] == before.get((route, name), 0) + 1
    assert {*found} - {*before} <= {(route, name), (route, name.partition(".")[0])}
    # Once for each client and process, which other tests start anew, or have told before.
    assert 1 <= stage.log.count(note) <= noted + 1


@pytest.mark.parametrize(("route", "name"), every(REFUSED))
def test_what_would_change_a_reply_and_cannot_be_done_is_refused_with_the_way_out(
    stage: Stage, route: str, name: str
) -> None:
    body = body_with(route, name, REFUSED[route][name])
    message = assert_refused(stage.post(route, body, stage.open_session()[1]), route, name)
    refusal = {
        **REFUSED_SAMPLING_OF_OTHER_ENGINES,
        **get_refusal_by_param(DIALECT_BY_ROUTE[route].request),
    }[name]
    assert re.search(r"would change the reply", message)
    assert message.endswith(f"({refusal.way_out})")
    assert stage.sglang.requests == []


@pytest.mark.parametrize("route", DIALECT_BY_ROUTE)
def test_a_refused_parameter_that_asks_for_nothing_is_neither_refused_nor_counted(
    stage: Stage, route: str
) -> None:
    before = ignored(stage)
    refusals = {
        **REFUSED_SAMPLING_OF_OTHER_ENGINES,
        **get_refusal_by_param(DIALECT_BY_ROUTE[route].request),
    }
    for name in REFUSED[route]:
        for value in (None, *refusals[name].harmless):
            ask_least(stage, stage.open_session()[1], route, **{name: value})
    assert ignored(stage) == before


def test_fields_of_a_reply_that_come_back_with_it_change_nothing(stage: Stage) -> None:
    """Those that the document lists as `messages[].NAME`, all at once."""
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
