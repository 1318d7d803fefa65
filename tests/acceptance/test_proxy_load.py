"""Many sessions at once through one proxy, and prompts that it refuses.

Writes `benchmarks/results/proxy_sessions.json`.
"""

import asyncio
import random
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from areal_hpc.proxy.http.driver_api import MAX_KEPT_EXPORTED_SESSIONS
from areal_hpc.proxy.sessions.store import SessionStore, decode_event
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.session.tree import unpack_ids
from areal_hpc.shards.journal import read_journal
from areal_hpc.wire.proxy import ExportReply
from tests.support.prompt_audit import prompt_ids, rendered_ids
from tests.support.proxy_stage import Stage
from tests.support.results import add_results
from tests.support.scripted_sglang import Script

pytestmark = pytest.mark.timeout(1800)

SESSIONS, TURNS = 1000, 8
REFUSED_CONTEXT_TOKENS, LARGE_BODY_BYTES = 32768, 10 << 20
MOST_GROWTH_MB = 150.0
TEXT = "hello world the quick brown fox jumps over lazy dog what is answer careful agent"
WORDS = TEXT.split()


def reply_to(request: dict[str, Any]) -> Script:
    rng = random.Random(sum(request["input_ids"]) * 1009 + len(request["input_ids"]))
    text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))
    return Script(text, finish=rng.choice(["eos", "eos", "length"]), delay_s=rng.random() * 0.05)


class Agent:
    """Speaks turn by turn, and remembers every reply that it saw the end of."""

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


async def play(agents: list[Agent], url: str, turns: int) -> None:
    """Calls of all agents at once, however long they take."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        await asyncio.gather(*(agent.speak(http, url, turns) for agent in agents))


async def end_all(agents: list[Agent], url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as http:
        await asyncio.gather(*(agent.end(http, url) for agent in agents))


def memory_mb(stage: Stage, name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{stage.pid}/status").read_text(), re.M)
    assert found
    return int(found[1]) / 1024


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
            agents = [Agent(number, *stage.open_session()) for number in range(SESSIONS)]
            began = time.monotonic()
            asyncio.run(play(agents, stage.url, TURNS))
            seconds = time.monotonic() - began
            store = SessionStore()
            for record in read_journal(stage.journal):
                store.apply(decode_event(record.payload))
            sent = {tuple(request["input_ids"]) for request in stage.sglang.requests}
            for agent in agents:
                tree = store.sessions[agent.session_id].tree
                assert [one.interaction_id for one in tree] == list(agent.seen)
                for one in tree:
                    interactions += 1
                    ids = prompt_ids(tree, one)
                    mismatches += tuple(ids) not in sent
                    mismatches += ids != rendered_ids(tree, one, template, encoder)
                    said = [*unpack_ids(one.output_ids)]
                    if one.closed:
                        said.pop()
                    mismatches += encoder.decode(said) != agent.seen[one.interaction_id]
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
