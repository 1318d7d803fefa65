"""Episodes stay within their limits of the model, and sessions within theirs of the proxy."""

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.proxy.engine.limits import LANES, MAX_COMPILING_GRAMMARS_PER_SESSION
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import SessionLimits
from tests.contract.proxy.talk import LEAST, QUESTION
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script
from tests.support.waiting import wait_for


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
    """Script a reply of twelve tokens, or of as many as the request allows."""
    tokens = min(12, request["sampling_params"]["max_new_tokens"])
    return Script("a", output_ids=[5] * tokens, finish="length")


@pytest.mark.parametrize("stream", [False, True])
def test_replies_are_cut_to_the_tokens_left_then_refused(stage: Stage, stream: bool) -> None:
    _, key = stage.open_session(limits=SessionLimits(max_tokens=20))
    stage.sglang.script = wordy
    assert stage.chat(key, QUESTION, stream=stream).status_code == 200
    assert stage.chat(key, QUESTION, stream=stream, max_tokens=100).status_code == 200
    max_tokens = [request["sampling_params"]["max_new_tokens"] for request in stage.sglang.requests]
    assert max_tokens == [20, 8]
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
    max_tokens = [request["sampling_params"]["max_new_tokens"] for request in stage.sglang.requests]
    assert max_tokens == [20, 8]


def test_a_call_that_fails_gives_its_tokens_back(stage: Stage) -> None:
    _, key = stage.open_session(limits=SessionLimits(max_tokens=20))
    stage.sglang.script = lambda request: Script(fault="400")
    assert stage.chat(key, QUESTION).status_code == 400
    stage.sglang.script = wordy
    assert stage.chat(key, QUESTION, max_tokens=20).status_code == 200
    assert stage.sglang.requests[-1]["sampling_params"]["max_new_tokens"] == 20


HEAVY = "root ::= " + '("a"?) ' * 5000


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


TRIES_GRAMMARS = """#!{python}
import json, os, sys, threading, time
print("{{}}", flush=True)

def answer(call, text):
    while "held" in text and not os.path.exists(sys.argv[0] + ".gate"):
        time.sleep(0.01)
    error = "it is a bomb" if "bomb" in text else ""
    print(json.dumps({{"call": call, "error": error}}) + "\\n", end="", flush=True)

for line in sys.stdin:
    with open(sys.argv[0] + ".log", "a") as log:
        log.write(line)
    asked = json.loads(line)
    if asked["type"] == "check":
        threading.Thread(target=answer, args=(asked["call"], asked["text"]), daemon=True).start()
"""
"""Stand-in for SGLang's Python, in which a grammar with the word `held` waits for the gate."""


@pytest.fixture(scope="module")
def trying_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("trying")
    with closing(Stage(folder, serve_python=str(write_program(folder)))) as stage:
        yield stage


def write_program(folder: Path) -> Path:
    program = folder / "python"
    program.write_text(TRIES_GRAMMARS.format(python=sys.executable))
    program.chmod(0o700)
    return program


def read_tried(stage: Stage) -> list[tuple[str, str]]:
    """Return kind and grammar of each request to the process; a kill has none."""
    log = Path(stage.config["serve_python"] + ".log")
    requests = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [(request["type"], request.get("text", "")) for request in requests]


def test_a_replica_gets_a_grammar_once_it_was_tried(trying_stage: Stage) -> None:
    stage, gate = trying_stage, Path(trying_stage.config["serve_python"] + ".gate")
    stage.sglang.script = lambda request: Script()
    stage.sglang.requests.clear()
    (_, key), (_, other) = stage.open_session(), stage.open_session()
    texts = [f"held until the gate opens: {i}" for i in range(MAX_COMPILING_GRAMMARS_PER_SESSION)]

    def count_tries() -> int:
        return sum(text in texts for _, text in read_tried(stage))

    with ThreadPoolExecutor(len(texts) + 1) as agents:
        try:
            calls = [agents.submit(stage.ask, key, "hi", regex=text) for text in texts]
            calls.append(agents.submit(stage.ask, other, "hi", regex=texts[0]))  # no try of its own
            wait_for(lambda: count_tries() == len(texts))
            assert stage.ask(key, "hi", regex="one more").status_code == 429
            assert stage.ask(other, "hi").status_code == 200  # without a grammar nobody waits
            assert len(stage.sglang.requests) == 1
        finally:
            gate.touch()
        assert {call.result().status_code for call in calls} == {200}
    gate.unlink()
    assert stage.ask(key, "hi", regex=texts[0]).status_code == 200
    assert count_tries() == len(texts)


@pytest.mark.parametrize("route", ["/generate", "/chat/completions"])
def test_a_costly_grammar_is_tried_once_and_on_no_replica(trying_stage: Stage, route: str) -> None:
    stage, text = trying_stage, f"bomb of {route}"
    stage.sglang.requests.clear()
    _, key = stage.open_session()
    bodies: dict[str, Any] = {
        "/generate": {"input_ids": [5], "sampling_params": {"regex": text}},
        "/chat/completions": {"messages": QUESTION, "regex": text},
    }
    for _ in range(2):
        answer = stage.post(route, bodies[route], key)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "regex")
        assert "takes too long to compile: it is a bomb" in answer.json()["error"]["message"]
    assert stage.sglang.requests == []
    assert read_tried(stage).count(("check", text)) == len(LANES)


def test_a_grammar_waits_no_longer_than_a_call_may_take(tmp_path: Path) -> None:
    program = str(write_program(tmp_path))
    limits = {"request_timeout_s": 1.0}
    with closing(Stage(tmp_path, serve_python=program, proxy=limits)) as stage:
        refused = stage.ask(stage.open_session()[1], "hi", regex="held for longer than that")
        assert refused.status_code == 503
        assert "was not tried within 1 s" in refused.json()["error"]["message"]
        wait_for(lambda: read_tried(stage)[-1] == ("kill", ""))


def test_a_sender_that_hangs_up_ends_the_try_of_its_grammar(trying_stage: Stage) -> None:
    stage = trying_stage
    _, key = stage.open_session()
    for i in range(MAX_COMPILING_GRAMMARS_PER_SESSION + 1):  # each frees its slot
        text = f"held for a sender that hangs up: {i}"
        call = stage.begin("/v1/chat/completions", {"messages": QUESTION, "regex": text}, key)
        wait_for(lambda text=text: ("check", text) in read_tried(stage))  # type: ignore[misc]
        kills = read_tried(stage).count(("kill", ""))
        call.close()
        wait_for(lambda kills=kills: read_tried(stage).count(("kill", "")) > kills)  # type: ignore[misc]


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
    assert refused.json()["error"]["param"] == "session"
    stage.restart_proxy()
    assert stage.ask(key, "more").status_code == 400
    assert stage.ask(stage.open_session()[1], "hi").status_code == 200
