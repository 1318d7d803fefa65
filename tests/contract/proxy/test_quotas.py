"""One session's grammars, calls and records are bounded; other sessions go on."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.proxy.engine.grammar_limits import MAX_COMPILING_GRAMMARS_PER_SESSION
from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.talk import QUESTION
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script
from tests.support.waiting import wait_for

HEAVY = "root ::= " + '("a"?) ' * 3000


@pytest.fixture(scope="module")
def frugal_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("frugal")
    limits = {"max_calls_per_session": 2, "max_session_bytes": 4000}
    with closing(Stage(folder, proxy=limits)) as stage:
        yield stage


@pytest.mark.parametrize(
    ("route", "more", "key_at_fault"),
    [
        ("/chat/completions", {"messages": QUESTION, "ebnf": HEAVY}, "ebnf"),
        ("/completions", {"prompt": "a", "ebnf": HEAVY}, "ebnf"),
        ("/generate", {"input_ids": [5], "sampling_params": {"ebnf": HEAVY}}, "ebnf"),
    ],
)
def test_a_heavy_grammar_never_reaches_a_replica(
    stage: Stage, key: str, route: str, more: dict[str, Any], key_at_fault: str
) -> None:
    answer = stage.post(route, more, key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, key_at_fault)
    assert stage.sglang.requests == []


def test_new_grammars_of_a_session_are_few_at_a_time_until_they_were_used(
    stage: Stage, key: str
) -> None:
    gate = threading.Event()
    stage.sglang.script = lambda request: Script(gate=gate)
    most = MAX_COMPILING_GRAMMARS_PER_SESSION
    with ThreadPoolExecutor(most) as agents:
        calls = [agents.submit(stage.ask, key, "hi", regex=f"new{i}") for i in range(most)]
        wait_for(lambda: len(stage.sglang.requests) == most)
        assert stage.ask(key, "hi", regex="one more").status_code == 429
        gate.set()
        assert {call.result().status_code for call in calls} == {200}
        gate.clear()
        calls = [agents.submit(stage.ask, key, "hi", regex=f"new{i}") for i in range(most)]
        wait_for(lambda: len(stage.sglang.requests) == 2 * most)
        gate.set()
        assert stage.ask(key, "hi", regex="one more").status_code == 200
        assert {call.result().status_code for call in calls} == {200}


def test_calls_of_one_session_do_not_take_the_places_of_others(frugal_stage: Stage) -> None:
    stage, gate = frugal_stage, threading.Event()
    stage.sglang.requests.clear()
    _, key = stage.open_session()
    _, other = stage.open_session()
    stage.sglang.script = lambda request: Script(gate=gate)
    with ThreadPoolExecutor(3) as agents:
        calls = [agents.submit(stage.ask, key, "hi") for _ in range(2)]
        wait_for(lambda: len(stage.sglang.requests) == 2)
        assert stage.ask(key, "a third").status_code == 429
        assert stage.ask(other, "three choices", n=3).status_code == 429
        calls.append(agents.submit(stage.ask, other, "hi"))
        wait_for(lambda: len(stage.sglang.requests) == 3)
        gate.set()
        assert {call.result().status_code for call in calls} == {200}
    assert stage.ask(key, "now there is room").status_code == 200


def test_a_session_records_no_more_than_its_share_also_after_a_restart(frugal_stage: Stage) -> None:
    stage = frugal_stage
    stage.sglang.script = lambda request: Script()
    _, key = stage.open_session(TicketRef(1, 0))
    assert stage.ask(key, "x" * 1900).status_code == 200
    refused = stage.ask(key, "more")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "proxy.max_session_bytes"
    stage.restart_proxy()
    assert stage.ask(key, "more").status_code == 400
    assert stage.ask(stage.open_session()[1], "hi").status_code == 200
