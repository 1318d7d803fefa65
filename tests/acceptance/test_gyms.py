"""Real gyms in Pythons of their own: three steps each before the real proxy.

`scripts/setup_gyms.sh` installs them, into `GYMS_DIR` if that is set.
"""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_hpc.agents.gym_agents import (
    GymnasiumAgent,
    McpAgent,
    NemoGymAgent,
    OpenEnvAgent,
    VerifiersAgent,
)
from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE
from examples.gyms.blackjack import HOW
from tests.support.environments import CHECKOUT
from tests.support.gym_stage import GymStage, call_tool
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(400)
GYMS = Path(os.environ.get("GYMS_DIR", CHECKOUT / ".venvs" / "gyms"))
TOOL_SERVER = """
import sys
from mcp.server import MCPServer

server = MCPServer("shop")

@server.tool()
def price(item: str) -> int:
    "Price of an item."
    return {"tea": 3, "cake": 4}[item]

if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
"""

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

class Config(vf.TasksetConfig):
    num_tasks: int = 5

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        return [
            Sum(Data(idx=n, prompt=f"What is {n} + {n}?", answer=str(2 * n)), self.config.task)
            for n in range(self.config.num_tasks)
        ]
"""


def python_of(gym: str) -> str:
    python = GYMS / gym / "bin" / "python"
    assert python.exists(), f"{python} is missing; scripts/setup_gyms.sh makes it"
    return str(python)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, list[str]]]]:
    """Play an agent before a model with given lines; return the rewards and the prompts."""
    stages = []

    def start(agent: Any, data: dict[str, Any], *lines: str) -> tuple[Any, list[str]]:
        stage = GymStage(tmp_path, lines)
        stages.append(stage)
        return stage.play(agent, data), stage.prompts

    yield start
    for stage in stages:
        stage.close()


def test_gymnasium_is_played_by_its_actions(play: Any) -> None:
    agent = GymnasiumAgent(
        "CliffWalking-v1", python=python_of("gymnasium"), prompt="Go.", max_turns=4
    )
    lines = ("<action>0</action>", "I go <action>1</action>", "what?", "so 1")
    rewards, prompts = play(agent, {"seed": 1}, *lines)
    assert list(rewards.values()) == [-1.0, -1.0, 0.0, -1.0]
    assert "Observation: 36" in prompts[0]
    assert "Observation: 24" in prompts[1]
    assert "Observation: 25" in prompts[2]
    assert "That is no action" in prompts[3]


def test_whatever_a_model_writes_for_a_list_of_numbers_is_an_action_or_none(play: Any) -> None:
    agent = GymnasiumAgent("Pendulum-v1", python=python_of("gymnasium"), max_turns=4)
    written = ('{"torque": 1}', "[" * 2000, "[1e999]", "[0.5]")
    lines = [f"<action>{text}</action>" for text in written]
    rewards, prompts = play(agent, {"seed": 1}, *lines)
    assert [reward == 0.0 for reward in rewards.values()] == [True, True, True, False]
    assert all("That is no action" in prompt for prompt in prompts[1:])


def test_tools_of_a_server_by_stdio_are_called(play: Any, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(TOOL_SERVER)
    let_anybody_read(tmp_path)
    command = [python_of("mcp"), str(script), "stdio"]
    agent = McpAgent(
        {"shop": {"command": command}},
        "areal_hpc.reward.gsm8k.gsm8k_reward_fn",
        python=python_of("mcp"),
        readonly_folders=[str(tmp_path)],
    )
    data = {"messages": [{"role": "user", "content": "Tea and cake?"}], "answer": "#### 7"}
    lines = (
        call_tool("price", '{"item": "tea"}'),
        call_tool("price", '{"item": "soap"}'),
        call_tool("price", '{"item": "cake"}'),
        "The answer is \\boxed{7}.",
    )
    reward, prompts = play(agent, data, *lines)
    assert reward == 1.0
    assert "Price of an item." in prompts[0]
    assert "<|im_start|>tool\n3<|im_end|>" in prompts[1]
    assert "error: " in prompts[2]
    assert "<|im_start|>tool\n4<|im_end|>" in prompts[3]


def test_tools_of_servers_by_http_have_their_server_s_name(play: Any, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(TOOL_SERVER)
    port = find_free_port()
    command = [python_of("mcp"), str(script), str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: answers(f"http://127.0.0.1:{port}/mcp"))
            url = {"url": f"http://127.0.0.1:{port}/mcp"}
            agent = McpAgent(
                {"one": url, "two": {**url, "headers": {"X-Key": "k"}}},
                "areal_hpc.reward.gsm8k.gsm8k_reward_fn",
                python=python_of("mcp"),
            )
            data = {"messages": [{"role": "user", "content": "Tea?"}], "answer": "#### 3"}
            lines = (
                call_tool("one__price", '{"item": "tea"}'),
                call_tool("two__price", '{"item": "cake"}'),
                "\\boxed{4}",
            )
            reward, prompts = play(agent, data, *lines)
        finally:
            server.kill()
    assert reward == 0.0
    assert "<|im_start|>tool\n3<|im_end|>" in prompts[1]
    assert "<|im_start|>tool\n4<|im_end|>" in prompts[2]


def test_openenv_is_played_on_a_server_of_its_own(play: Any, tmp_path: Path) -> None:
    command = [str(GYMS / "openenv/bin/openenv"), "init", "echo_env"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    let_anybody_read(tmp_path)
    agent = OpenEnvAgent(
        app="echo_env.server.app:app",
        python=python_of("openenv"),
        variables={"PYTHONPATH": str(tmp_path)},
        max_turns=3,
    )
    rewards, prompts = play(agent, {}, "ab", "<action>abcd</action>", "x")
    assert [round(reward, 1) for reward in rewards.values()] == [0.2, 0.4, 0.1]
    assert "Echo Env environment ready!" in prompts[0]
    assert '{"echoed_message": "abcd", "message_length": 4}' in prompts[2]


def test_nemo_gym_is_played_by_steps(play: Any) -> None:
    agent = NemoGymAgent("blackjack", python=python_of("nemo-gym"), max_turns=8)
    lines = ("<action>hit</action>", "<action>hit</action>", "<action>stand</action>")
    rewards, prompts = play(agent, read_nemo_row("blackjack"), *lines)
    *before, last = rewards.values()
    assert before == [0.0] * len(before)
    assert last in (-1.0, 0.0, 1.0)
    assert "Deal me in." in prompts[0]
    assert "Your hand: [" in prompts[0]


def test_nemo_gym_s_tools_are_called_and_its_verdict_counts(play: Any) -> None:
    server = "example_single_tool_call"
    agent = NemoGymAgent(server, python=python_of("nemo-gym"))
    lines = (call_tool("get_weather", '{"city": "Oslo"}'), "It is cold.")
    rewards, prompts = play(agent, read_nemo_row(server), *lines)
    assert list(rewards.values()) == [0.0, 1.0]
    assert "The weather in Oslo is cold." in prompts[1]


def test_verifiers_plays_a_task_of_its_task_set(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISOLATION_VARIABLE, "none")  # its harness fetches uv, and what that fetches
    (tmp_path / "sums.py").write_text(TASKSET)
    let_anybody_read(tmp_path)
    agent = VerifiersAgent(
        {"id": "sums", "num_tasks": 3},
        python=python_of("verifiers"),
        variables={"PYTHONPATH": str(tmp_path)},
        max_tokens=50,
    )
    reward, prompts = play(agent, {"index": 2}, "It is 4.")
    assert (reward.value, reward.parts) == (1.5, {"right": 1.0, "short": 0.5})
    assert "What is 2 + 2?" in prompts[0]


def test_demonstrations_of_blackjack_look_like_the_gym(play: Any) -> None:
    agent = GymnasiumAgent("Blackjack-v1", python=python_of("gymnasium"), max_turns=2)
    _, prompts = play(agent, {"seed": 1_000_002}, "<action>1</action>", "<action>0</action>")
    assert f"Observation: [21, 10, 1]\n{HOW}" in prompts[0]
    assert "Observation: [13, 10, 0]" in prompts[1]


def let_anybody_read(folder: Path) -> None:
    """Let other users read, as a gym does that root's run starts as another user."""
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)


def read_nemo_row(server: str) -> dict[str, Any]:
    (file,) = GYMS.glob(
        f"nemo-gym/lib/*/site-packages/resources_servers/{server}/data/example.jsonl"
    )
    row: dict[str, Any] = json.loads(file.read_text().splitlines()[0])
    return row


def find_free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=5)
    except httpx.TransportError:
        return False
    return True
