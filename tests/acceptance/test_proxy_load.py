"""Load of one proxy: many sessions at once, its death amid them, and grammars that explode.

24 sessions send such grammars at once to the proxy of a real SGLang. It refuses them, and meanwhile
answers 100 calls of other sessions, half of which have a grammar or tools. Writes
`benchmarks/results/proxy_sessions.json` and `grammar_bombs.json`.
"""

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest

from areal_hpc.jobs.config import get_interpreter
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.proxy.http.driver_api import MAX_KEPT_EXPORTED_SESSIONS, build_export_rows
from areal_hpc.proxy.sessions.store import SessionStore, decode_event
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.session.tree import unpack_ids
from areal_hpc.shards.journal import read_journal
from areal_hpc.wire.proxy import ExportReply, ExportRequest
from tests.support.chatml import TRAINING_TEXT
from tests.support.prompt_audit import prompt_ids, rendered_ids
from tests.support.proxy_stage import Stage
from tests.support.results import add_results
from tests.support.scripted_sglang import Script
from tests.support.sglang_server import serving

pytestmark = pytest.mark.timeout(1800)

SESSIONS, TURNS = 1000, 8
KILLED_SESSIONS = 64
REFUSED_CONTEXT_TOKENS, LARGE_BODY_BYTES = 32768, 10 << 20
MOST_GROWTH_MB = 150.0
TEXT = "hello world the quick brown fox jumps over lazy dog what is answer careful agent"
WORDS = TEXT.split()


def reply_to(request: dict[str, Any]) -> Script:
    rng = random.Random(sum(request["input_ids"]) * 1009 + len(request["input_ids"]))
    text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))
    return Script(text, finish=rng.choice(["eos", "eos", "length"]), delay_s=rng.random() * 0.05)


class Agent:
    """Agent that asks turn by turn, and remembers every reply whose end it received."""

    def __init__(self, number: int, session_id: str, key: str) -> None:
        self.number = number
        self.session_id = session_id
        self._headers = {"authorization": f"Bearer {key}"}
        self.messages = [{"role": "system", "content": f"You are agent {number}."}]
        self.seen: dict[str, str] = {}
        self.errors = 0

    async def speak(self, http: aiohttp.ClientSession, url: str, turns: int) -> None:
        for turn in range(turns):
            question = {"role": "user", "content": f"{WORDS[turn % 7]} {self.number} {turn}?"}
            body = {"messages": [*self.messages, question], "max_tokens": 64}
            route = f"{url}/v1/chat/completions"
            async with http.post(route, json=body, headers=self._headers) as answer:
                if answer.status != 200:
                    self.errors += 1
                    return
                reply = await answer.json()
            message = reply["choices"][0]["message"]
            self.seen[reply["id"]] = message["content"]
            self.messages += [question, {"role": "assistant", "content": message["content"]}]

    async def end(self, http: aiohttp.ClientSession, url: str) -> None:
        async with http.post(f"{url}/rl/end_session", json={}, headers=self._headers) as answer:
            self.errors += answer.status != 200


def open_agents(stage: Stage, count: int) -> list[Agent]:
    return [Agent(number, *stage.open_session()) for number in range(count)]


def unlimited() -> aiohttp.ClientSession:
    """Open a client without limits, for calls of all agents at once."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(timeout=timeout, connector=connector)


async def play(agents: list[Agent], url: str, turns: int) -> None:
    async with unlimited() as http:
        await asyncio.gather(*(agent.speak(http, url, turns) for agent in agents))


async def end_all(agents: list[Agent], url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as http:
        await asyncio.gather(*(agent.end(http, url) for agent in agents))


def remembered(stage: Stage) -> SessionStore:
    (journal,) = stage.journal_dir.glob("*/journal")
    store = SessionStore()
    for record in read_journal(journal):
        store.apply(decode_event(record.payload))
    return store


def memory_mb(stage: Stage, name: str) -> float:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{stage.pid}/status").read_text(), re.M)
    assert match
    return int(match[1]) / 1024


def export(stage: Stage, agent: Agent) -> ExportReply:
    reply = stage.post("/export_trajectories", {"session_id": agent.session_id})
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=ExportReply)


def test_a_thousand_sessions_at_once_lose_nothing_and_mistake_no_token(tmp_path: Path) -> None:
    peaks_mb, seconds, errors, mismatches, interactions = [], 0.0, 0, 0, 0
    with closing(Stage(tmp_path, context_tokens=16384)) as stage:
        stage.sglang.script = reply_to
        template = ChatTemplate.from_model_dir(stage.model_dir)
        encoder = TokenEncoder.from_model_dir(stage.model_dir)
        idle_mb = memory_mb(stage, "VmRSS")
        for _ in range(2):
            stage.sglang.requests.clear()
            agents = open_agents(stage, SESSIONS)
            began = time.monotonic()
            asyncio.run(play(agents, stage.url, TURNS))
            seconds = time.monotonic() - began
            store = remembered(stage)
            sent = {tuple(request["input_ids"]) for request in stage.sglang.requests}
            for agent in agents:
                tree = store.sessions[agent.session_id].tree
                assert [call.interaction_id for call in tree] == list(agent.seen)
                for call in tree:
                    interactions += 1
                    ids = prompt_ids(tree, call)
                    mismatches += tuple(ids) not in sent
                    mismatches += ids != rendered_ids(tree, call, template, encoder)
                    reply_ids = [*unpack_ids(call.output_ids)]
                    if call.closed:
                        reply_ids.pop()
                    mismatches += encoder.decode(reply_ids) != agent.seen[call.interaction_id]
            asyncio.run(end_all(agents, stage.url))
            errors += sum(agent.errors for agent in agents)
            for agent in agents:
                assert len(export(stage, agent).interactions) >= 1
            peaks_mb.append(memory_mb(stage, "VmHWM"))
        health = stage.http.get(f"{stage.url}/healthz").json()
        left_mb = memory_mb(stage, "VmRSS")
    add_results(
        "proxy_sessions",
        sessions=SESSIONS,
        turns=TURNS,
        interactions_of_both_waves=interactions,
        errors=errors,
        token_mismatches=mismatches,
        seconds_of_last_wave=round(seconds, 1),
        proxy_mb_idle=round(idle_mb, 1),
        proxy_mb_peak_by_wave=[round(peak, 1) for peak in peaks_mb],
        proxy_mb_after_all=round(left_mb, 1),
    )
    assert (errors, mismatches, interactions) == (0, 0, 2 * SESSIONS * TURNS)
    assert health["sessions"] <= MAX_KEPT_EXPORTED_SESSIONS
    assert peaks_mb[0] < 600
    assert peaks_mb[1] < 1.15 * peaks_mb[0]


async def play_until_killed(stage: Stage, agents: list[Agent], after_s: float) -> None:
    async with unlimited() as http:
        url = stage.url
        speaking = [asyncio.ensure_future(agent.speak(http, url, 1000)) for agent in agents]
        await asyncio.sleep(after_s)
        await asyncio.to_thread(stage.kill_proxy)
        for ended in await asyncio.gather(*speaking, return_exceptions=True):
            assert isinstance(ended, aiohttp.ClientError), ended


def test_every_reply_that_a_client_saw_outlives_kill_9(tmp_path: Path) -> None:
    seen = 0
    with closing(Stage(tmp_path, context_tokens=1 << 17)) as stage:
        stage.sglang.script = reply_to
        agents = open_agents(stage, KILLED_SESSIONS)
        for kill in range(3):
            asyncio.run(play_until_killed(stage, agents, after_s=1.5 + 0.4 * kill))
            store = remembered(stage)
            for agent in agents:
                tree = store.sessions[agent.session_id].tree
                for interaction_id, content in agent.seen.items():
                    assert tree[interaction_id].reply["content"] == content
            seen = sum(len(agent.seen) for agent in agents)
            stage.start_proxy()
        asyncio.run(play(agents, stage.url, 1))
        assert sum(agent.errors for agent in agents) == 0
        store = remembered(stage)
        asyncio.run(end_all(agents, stage.url))
        for agent in agents:
            tree = store.sessions[agent.session_id].tree
            expected = build_export_rows(tree, ExportRequest(agent.session_id))
            assert export(stage, agent).interactions == expected
    add_results(
        "proxy_sessions",
        killed_sessions=KILLED_SESSIONS,
        kills=3,
        replies_seen_before_the_last_kill=seen,
        replies_seen_and_lost=0,
    )
    assert seen > 3 * KILLED_SESSIONS


@pytest.mark.parametrize(
    ("name", "prompts", "prompt_bytes"),
    [
        ("refused_prompts", 1000, 36_000),  # 33 thousand tokens: too many by a little
        ("refused_large_bodies", 20, LARGE_BODY_BYTES),
    ],
)
def test_refused_prompts_leave_no_memory(
    name: str, prompts: int, prompt_bytes: int, tmp_path: Path
) -> None:
    rng, growth_mb = random.Random(1), 0.0
    with closing(Stage(tmp_path, context_tokens=REFUSED_CONTEXT_TOKENS)) as stage:
        _, key = stage.open_session()
        assert stage.ask(key, "hi").status_code == 200
        idle_mb = memory_mb(stage, "VmRSS")
        for _ in range(prompts):
            answer = stage.ask(key, rng.randbytes(prompt_bytes // 2).hex())
            assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
            growth_mb = max(growth_mb, memory_mb(stage, "VmRSS") - idle_mb)
    add_results("proxy_sessions", **{name: prompts, f"{name}_growth_mb": round(growth_mb, 1)})
    assert growth_mb < MOST_GROWTH_MB


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
    """Build rules of which each is twice the next one or nothing: 2**levels derivations."""
    rules = [f'a{i} ::= a{i + 1} a{i + 1} | ""' for i in range(levels)]
    return "\n".join([f"root ::= {root}", *rules, f"a{levels} ::= {end}"])


def list_bombs() -> list[dict[str, str]]:
    """List grammars that are ambiguous at once, after some text, by recursion, or rarely."""
    ends = ('[^a] | ""', '[a-z] | ""', '"a" | "b" | ""')
    bombs = [chain(levels, "a0", end) for levels in (20, 40, 60) for end in ends]
    bombs += [chain(60, f'"{prefix}" a0', end) for prefix in ("x", "hello", "{") for end in ends]
    bombs += [f'root ::= root root | [{letters}] | ""' for letters in ("a-z", "a-z ", "a-zA-Z ")]
    bombs += [
        f'root ::= [a-y ] root | "~" b\nb ::= b b | [{letters}]' for letters in ("a-z", "a-z ", "a")
    ]
    return [{"ebnf": grammar} for grammar in bombs]


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
    assert len({json.dumps(bomb) for bomb in bombs}) == BOMBS
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
        while not all(call.done() for call in thrown):
            beside += ask_honestly(stage, keys)
        for call in thrown:
            call.result()
    figures = {
        "bombs": len(refused_s),
        "last_refused_after_s": round(max(refused_s), 1),
        "alone": {"calls": len(alone), **count_times(alone)},
        "beside": {"calls": len(beside), **count_times(beside)},
    }
    add_results("grammar_bombs", **figures)
    assert len(beside) >= HONEST_CALLS
    assert count_times(beside)["p99_s"] <= MAX_P99_S, figures
