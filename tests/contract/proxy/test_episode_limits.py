"""An episode uses no more of the model than its limits say; what was said is kept."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from areal_hpc.wire.proxy import SessionLimits
from tests.contract.proxy.talk import LEAST, QUESTION
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script


@pytest.mark.parametrize("route", LEAST)
def test_turns_beyond_the_limit_are_refused_in_the_dialect(stage: Stage, route: str) -> None:
    _, key = stage.open_session(limits=SessionLimits(max_turns=2))
    answers = [stage.post(route, LEAST[route], key) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    error = answers[-1].json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "2 turns, 2 were taken" in error["message"]
    assert stage.post("/rl/set_reward", {"reward": 1.0}, key).status_code == 200
    assert stage.end_session(key) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_choices_that_are_under_way_count(stage: Stage, stream: bool) -> None:
    _, key = stage.open_session(limits=SessionLimits(max_turns=4))
    stage.sglang.script = lambda request: Script(delay_s=0.5)

    def ask(_: int) -> int:
        return stage.chat(key, QUESTION, n=3, stream=stream).status_code

    with ThreadPoolExecutor(2) as agents:
        assert sorted(agents.map(ask, range(2))) == [200, 400]


def wordy(request: dict[str, Any]) -> Script:
    """Twelve tokens, or as many as it may say."""
    tokens = min(12, request["sampling_params"]["max_new_tokens"])
    return Script("a", output_ids=[5] * tokens, finish="length")


@pytest.mark.parametrize("stream", [False, True])
def test_replies_are_cut_to_the_tokens_left_then_refused(stage: Stage, stream: bool) -> None:
    _, key = stage.open_session(limits=SessionLimits(max_tokens=20))
    stage.sglang.script = wordy
    assert stage.chat(key, QUESTION, stream=stream).status_code == 200
    assert stage.chat(key, QUESTION, stream=stream, max_tokens=100).status_code == 200
    asked = [one["sampling_params"]["max_new_tokens"] for one in stage.sglang.requests]
    assert asked == [20, 8]
    refused = stage.chat(key, QUESTION)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "limits.max_tokens"
    assert "may sample 20 tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_at_once_are_cut_as_if_one_came_after_the_other(stage: Stage, stream: bool) -> None:
    _, key = stage.open_session(limits=SessionLimits(max_tokens=20))
    stage.sglang.script = lambda request: replace(wordy(request), delay_s=0.3)

    def ask(_: int) -> int:
        return stage.chat(key, QUESTION, stream=stream).status_code

    with ThreadPoolExecutor(3) as agents:
        assert sorted(agents.map(ask, range(3))) == [200, 200, 400]
    asked = [one["sampling_params"]["max_new_tokens"] for one in stage.sglang.requests]
    assert asked == [20, 8]


def test_a_call_that_fails_gives_its_tokens_back(stage: Stage) -> None:
    _, key = stage.open_session(limits=SessionLimits(max_tokens=20))
    stage.sglang.script = lambda request: Script(fault="400")
    assert stage.chat(key, QUESTION).status_code == 400
    stage.sglang.script = wordy
    assert stage.chat(key, QUESTION, max_tokens=20).status_code == 200
    assert stage.sglang.requests[-1]["sampling_params"]["max_new_tokens"] == 20
