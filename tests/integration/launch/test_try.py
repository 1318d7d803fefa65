"""`areal-hpc try` plays the agent's episodes before the real proxy, without a model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from areal_hpc.launch.tiny_model import make_tiny_model
from tests.support.commands import areal_hpc
from tests.support.scripted_sglang import LoopThread, Script, ScriptedSGLang, start_web_app
from tests.support.small_run import WITHOUT_SETS
from tests.support.thoroughness import choose

AGENTS = "tests.support.agents"
QUESTION = "How many roads must a man walk down?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, [QUESTION, "forty-two it is, Sure?"], hidden=32, heads=2, kv_heads=2,
                    head_dim=16)  # fmt: skip
    return folder


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> tuple[str, ...]:
    """Write a recipe of two tasks and its model, and return the words of a command line."""
    rows = [{"messages": [{"role": "user", "content": QUESTION}], "answer": "42"}] * 2
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        "recipes/quickstart.yaml",
        "model.tiny=null",
        f"model.path={model}",
        "sft=null",
        "valid_dataset=null",
        *WITHOUT_SETS,
        "train_dataset.generator=null",
        "train_dataset.kwargs={}",
        f"train_dataset.path={tmp_path}/tasks.jsonl",
        f"cluster.fileroot={tmp_path}/runs",
    )


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("inference.tool_call_parser=qwn25", "SGLang has no parser 'qwn25'", "mean qwen25?"),
        ("inference.reasoning_parser=none", "SGLang has no parser 'none'", "choose from apertus"),
        ("model.path=Qwen/Qwen3-0.6B", "no model directory", "mean model.hub=Qwen/Qwen3-0.6B?"),
        ("train_dataset.path={}/empty.jsonl", "/empty.jsonl gave no row", "at: train_dataset.path"),
    ],
)
def test_parsers_models_and_sources_that_are_not_there_are_refused(
    override: str, message: str, hint: str, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    ended = areal_hpc("try", *recipe, override.format(tmp_path))
    assert ended.returncode == 78
    assert message in ended.stderr
    assert hint in ended.stderr


def test_a_conversation_its_reward_and_its_rows_are_shown(
    recipe: tuple[str, ...], tmp_path: Path
) -> None:
    """The agent streams nothing, blocks its event loop between two turns, and gets its replies."""
    ended = areal_hpc("try", *recipe, f"rollout.workflow={AGENTS}.TwoTurnAgent", "-n", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(f"user       {QUESTION}") == 2
    assert ended.stdout.count("user       Sure?") == 2
    assert ended.stdout.count("printed    9 lines, of which the last:\n           line 4\n") == 2
    assert "prompt re-used" in ended.stdout
    assert ended.stdout.count("reward     0.5") == 2
    assert "which are trained; 2 calls, reward 0.5" in ended.stdout
    assert "2 of 2 episodes ended well; rewards from 0.5 to 0.5: 0.5 0.5" in ended.stdout
    assert " of agent" not in ended.stdout
    assert "trainer.batch_size=32 is more than the 2 rows of train_dataset" in ended.stdout
    assert not (tmp_path / "runs").exists(), "a trial leaves nothing behind"


def test_agents_within_an_episode_and_the_range_of_rewards_are_shown(
    recipe: tuple[str, ...], tmp_path: Path
) -> None:
    tasks = [
        {"messages": [{"role": "user", "content": QUESTION}], "answer": a} for a in ("42", "7")
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    batch = "trainer.batch_size=2"
    ended = areal_hpc("try", *recipe, f"rollout.workflow={AGENTS}.DelegatingAgent", batch)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("[call 1 of agent (no id): ") == 2
    assert ended.stdout.count("[call 2 of agent helper: ") == 2
    assert "rewards from 0 to 2: 2 0" in ended.stdout
    assert "rows of train_dataset" not in ended.stdout


FAILING_AGENTS = [
    ("RaisesKeyError", "tests/support/broken_agents.py:28\n"),
    ("MakesNoCall", "no call to the model had been answered"),
    ("ReturnsString", "the agent returned '1.0' (str), expected a finite float"),
    ("AsksForTools", "set inference.tool_call_parser to the model's format"),
]


@pytest.mark.parametrize(
    ("agent", "message"),
    choose(FAILING_AGENTS, FAILING_AGENTS[0], FAILING_AGENTS[3]),
)
def test_a_failing_agent_is_told_with_its_place_and_ends_with_70(
    agent: str, message: str, recipe: tuple[str, ...]
) -> None:
    ended = areal_hpc(
        "try", *recipe, f"rollout.workflow=tests.support.broken_agents.{agent}", "-n", "2"
    )
    assert ended.returncode == 70, ended.stdout + ended.stderr
    assert message in ended.stdout
    assert "--- task 1 failed as task 0 did" in ended.stdout
    assert "0 of 2 episodes ended well" in ended.stdout


def test_an_agent_that_blocks_its_event_loop_is_named(recipe: tuple[str, ...]) -> None:
    agent = "rollout.workflow=tests.support.broken_agents.BlocksLoop"
    ended = areal_hpc("try", *recipe, agent, "-n", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the agent has blocked the event loop for" in ended.stderr
    assert "broken_agents.py:68" in ended.stderr


def test_an_agent_in_a_process_of_its_own_is_tried_as_well(recipe: tuple[str, ...]) -> None:
    mode = "rollout.agent.mode=subproc"
    ended = areal_hpc("try", *recipe, f"rollout.workflow={AGENTS}.ProcessAgent", mode, "-n", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "reward     2" in ended.stdout


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


def test_a_running_sglang_is_asked(recipe: tuple[str, ...], model: Path, loop: LoopThread) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    server = ScriptedSGLang(tokenizer, lambda request: Script("forty-two"))
    loop.run(server.start())
    try:
        ended = areal_hpc(
            "try",
            *recipe,
            f"rollout.workflow={AGENTS}.GreedyAgent",
            "--base-url",
            f"{server.url}/v1",
        )
    finally:
        loop.run(server.stop())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("assistant  forty-two\n") == len(server.requests) == 2
    lost = r" [1-9]\d* tokens of replies leave the loss: they were sampled with temperature=0\n"
    assert len(re.findall(lost, ended.stdout)) == 2


def test_a_server_other_than_sglang_is_refused(recipe: tuple[str, ...], loop: LoopThread) -> None:
    runner, url = loop.run(start_web_app(web.Application()))
    try:
        ended = areal_hpc("try", *recipe, "--base-url", f"{url}/v1")
    finally:
        loop.run(runner.cleanup())
    assert ended.returncode == 78
    assert f"the server at {url} is no SGLang" in ended.stderr


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("--base-url", "http://127.0.0.1:1/v1"), 75, "no server answers at http://127.0.0.1:1 "),
        (("rollout.workflow=tests.support.agents.ChatAgnt",), 78, "did you mean 'ChatAgent'"),
        (("rollout.agent.mode=online", "rollout.workflow=''"), 78, "there is no agent to try"),
        (("train_dataset.path=/no/tasks.jsonl",), 78, "there is no data set at /no/tasks.jsonl"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    more: tuple[str, ...], code: int, message: str, recipe: tuple[str, ...]
) -> None:
    ended = areal_hpc("try", *recipe, f"rollout.workflow={AGENTS}.ChatAgent", *more)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
