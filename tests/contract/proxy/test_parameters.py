"""What becomes of parameters in each dialect: used, without effect, or refused with a way out."""

from typing import Any

import pytest

from areal_hpc.proxy.dialects.parameters import REFUSED_SAMPLING_OF_OTHER_ENGINES
from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from tests.contract.proxy.parameter_samples import HINTS, REFUSED, body_with, body_without
from tests.contract.proxy.talk import QUESTION, ask_least, assert_refused, ignored
from tests.support.parameter_table import (
    get_refusal_by_param,
    list_effective_params,
    list_ignored_params_of,
)
from tests.support.proxy_stage import Stage


def sent(stage: Stage, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """What reaches the engine of a request with more."""
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
        found = ignored(stage)
        assert found[route, name] == before.get((route, name), 0) + 1
        assert {*found} - {*before} <= {(route, name), (route, name.partition(".")[0])}
        # Once for each client and process, which other tests start anew, or have told before.
        assert note in stage.log


@pytest.mark.parametrize("route", DIALECT_BY_ROUTE)
def test_what_would_change_a_reply_and_cannot_be_done_is_refused_with_the_way_out(
    stage: Stage, route: str
) -> None:
    _, key = stage.open_session()
    known = get_refusal_by_param(DIALECT_BY_ROUTE[route].request)
    refusals = {**REFUSED_SAMPLING_OF_OTHER_ENGINES, **known}
    for name, value in REFUSED[route].items():
        answer = stage.post(route, body_with(route, name, value), key)
        message = assert_refused(answer, route, name)
        assert "would change the reply" in message
        assert message.endswith(f"({refusals[name].way_out})")
    assert stage.sglang.requests == []


@pytest.mark.parametrize("route", DIALECT_BY_ROUTE)
def test_what_asks_for_nothing_is_neither_refused_nor_counted(stage: Stage, route: str) -> None:
    """Null whatever is null, and harmless values of what is refused: all of the table at once."""
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
