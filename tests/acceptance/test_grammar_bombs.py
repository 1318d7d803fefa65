"""Grammars that would stop a real SGLang are refused, and nobody waits for them.

24 bombs of 24 sessions come at once; meanwhile 100 calls of others are answered, half of which have
a grammar or tools. What those took goes to `benchmarks/results/grammar_bombs.json`, beside what the
same calls take alone.
"""

import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_hpc.jobs.environment import get_interpreter
from areal_hpc.launch.tiny_model import make_tiny_model
from tests.support.chatml import TRAINING_TEXT
from tests.support.proxy_stage import Stage
from tests.support.results import add_results
from tests.support.sglang_server import serving

pytestmark = pytest.mark.timeout(1800)

BOMBS, HONEST_CALLS, HONEST_CALLERS = 24, 100, 2
REPLY_TOKENS = 4
"""Few: on two cores a longer reply takes longer than all that is looked at here."""
MAX_P99_S = 1.0
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
HONEST: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {},
    {"tools": [TOOL], "tool_choice": "required"},
]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    make_tiny_model(tmp_path / "tiny", TRAINING_TEXT * 20, seed=5)
    with serving(tmp_path / "tiny", tmp_path / "sglang.log", "--weight-version", "1.0") as url:
        stage = Stage(
            tmp_path / "stage",
            model_dir=tmp_path / "tiny",
            context_tokens=1024,
            tool_call_parser="qwen25",
            serve_python=get_interpreter("serve", "auto"),
        )
        stage.route_to(url)
        stage.http.timeout = httpx.Timeout(1500.0)  # bombs have what time others leave
        yield stage
        stage.close()


def chain(levels: int, root: str, end: str) -> str:
    """Rules each of which is twice the next one or nothing: 2**levels ways to say the same."""
    rules = [f'a{i} ::= a{i + 1} a{i + 1} | ""' for i in range(levels)]
    return "\n".join([f"root ::= {root}", *rules, f"a{levels} ::= {end}"])


def list_bombs() -> list[dict[str, str]]:
    """Ambiguous at once, once some text is said, by recursion, and in a way hardly taken."""
    ends = ('[^a] | ""', '[a-z] | ""', '"a" | "b" | ""')
    bombs = [chain(levels, "a0", end) for levels in (20, 40, 60) for end in ends]
    bombs += [chain(60, f'"{said}" a0', end) for said in ("x", "hello", "{") for end in ends]
    bombs += [f'root ::= root root | [{letters}] | ""' for letters in ("a-z", "a-z ", "a-zA-Z ")]
    bombs += [f'root ::= [a-y ] root | "~" b\nb ::= b b | [{one}]' for one in ("a-z", "a-z ", "a")]
    return [{"ebnf": one} for one in bombs]


def ask_honestly(stage: Stage, keys: list[str]) -> list[float]:
    """The times that the calls took, a warm-up not counted."""

    def ask(number: int) -> float:
        began = time.monotonic()
        body = {**HONEST[number % len(HONEST)], "max_tokens": REPLY_TOKENS}
        answer = stage.ask(keys[number % len(keys)], f"question {number}", **body)
        assert answer.status_code == 200, answer.text
        return time.monotonic() - began

    for number in range(len(HONEST)):
        ask(number)
    with ThreadPoolExecutor(HONEST_CALLERS) as callers:
        return list(callers.map(ask, range(HONEST_CALLS)))


def count_times(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    p99_s = ordered[-(-99 * len(ordered) // 100) - 1]
    figures = {"p50_s": statistics.median(ordered), "p99_s": p99_s, "max_s": ordered[-1]}
    return {name: round(value, 3) for name, value in figures.items()}


def test_bombs_are_refused_while_the_calls_of_others_are_answered(stage: Stage) -> None:
    bombs = list_bombs()
    assert len({json.dumps(one) for one in bombs}) == BOMBS
    keys = [stage.open_session()[1] for _ in range(10)]
    alone = ask_honestly(stage, keys)
    refused_s: list[float] = []

    def throw(bomb: dict[str, str]) -> None:
        key, began = stage.open_session()[1], time.monotonic()
        while (answer := stage.ask(key, "hi", max_tokens=64, **bomb)).status_code == 503:
            continue  # a busy machine had no time to find it out
        assert answer.status_code == 400, answer.text
        assert "the grammar takes too long to compile" in answer.json()["error"]["message"]
        refused_s.append(time.monotonic() - began)

    beside: list[float] = []
    with ThreadPoolExecutor(BOMBS) as throwers:
        thrown = [throwers.submit(throw, bomb) for bomb in bombs]
        while not all(one.done() for one in thrown):
            beside += ask_honestly(stage, keys)
        for one in thrown:
            one.result()
    figures = {
        "bombs": len(refused_s),
        "last_refused_after_s": round(max(refused_s), 1),
        "alone": {"calls": len(alone), **count_times(alone)},
        "beside": {"calls": len(beside), **count_times(beside)},
    }
    add_results("grammar_bombs", **figures)
    assert len(beside) >= HONEST_CALLS
    assert count_times(beside)["p99_s"] <= MAX_P99_S, figures
