"""Agents of another Python: nothing of areal_hpc in it, and of the environment what is named."""

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.checks.user_code import find_user_code_problems
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rollout.job import build_agent
from tests.integration.rollout.test_episode import TASK, finish, play_all, spec
from tests.support.commands import write_program
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for

AGENT = """
import json, os, subprocess, sys, time, urllib.request

class Verdict:
    value, parts, metrics, note = 0.5, {"half": 0.5}, {"calls": 1}, "a note"
    answer = "42"

class Agent:
    def __init__(self, reward=1.0):
        self.reward, self.runs = reward, 0

    async def run(self, data):
        self.runs += 1
        print("no answer")
        assert "areal_hpc" not in sys.modules
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps({"model": "m", "messages": data["messages"]}).encode(),
            {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        )
        urllib.request.urlopen(request).read()
        then = data.get("then")
        if then == "raise":
            raise ValueError("no idea")
        if then == "leave":
            os._exit(7)
        if then == "run short":
            raise ConnectionError("no connection") from OSError(24, "Too many open files")
        if then == "hang":
            time.sleep(600)
        if then == "object":
            return object()
        if then == "start":
            left = subprocess.Popen(["sleep", "600"], start_new_session=True)
            open(data["note"], "w").write(str(left.pid))
        if then == "forge":
            line = json.dumps({"returned": 9.0}) + chr(10)
            forger = f"import os, sys; os.write(0, {line!r}.encode()); sys.exit(3)"
            subprocess.run([sys.executable, "-c", forger], stderr=subprocess.DEVNULL)
        if then == "environment":
            seen = {"SECRET", "SEARCH_KEY", "PATH"} & set(os.environ)
            open(data["note"], "w").write(" ".join(sorted(seen)))
        return Verdict() if then == "verdict" else self.reward * self.runs
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python without packages, and an agent that it finds."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "their_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path / "user")
    return str(write_program(tmp_path / "python", f'exec {sys.executable} -S -E "$@"'))


def play(run_dir: Path, python: str, *tasks: dict[str, Any], **how: Any) -> list[EpisodeOutcome]:
    """Episodes one after the other, in one process."""
    config = AgentExecutionConfig.model_validate(
        {"mode": "subproc", "python": python, "subproc_max_workers": 1, **how}
    )
    agent = build_agent(config, "their_agent.Agent", {"reward": 2.0})
    assert isinstance(agent, SubprocessAgent)
    specs = [
        dataclasses.replace(
            spec(2.0 if task.get("then") == "hang" else 60.0), data={**TASK, **task}
        )
        for task in tasks
    ]

    async def build_and_play() -> list[EpisodeOutcome]:
        await agent.check_agent_builds()
        outcomes, _ = await play_all(run_dir, agent, *specs)
        return outcomes

    return finish(build_and_play())


def test_it_is_built_once_and_needs_no_areal_hpc(python: str, tmp_path: Path) -> None:
    outcomes = play(tmp_path, python, {}, {}, {"then": "verdict"})
    assert [one.status for one in outcomes] == ["ok"] * 3, outcomes[0].reason
    assert [one.reward for one in outcomes] == [2.0, 4.0, 0.5]
    assert outcomes[2].answer == "42"


def test_one_that_raises_leaves_or_hangs_costs_its_episode(python: str, tmp_path: Path) -> None:
    thens = ("raise", "object", "leave", "hang", "run short", "")
    outcomes = play(tmp_path, python, *({"then": then} for then in thens))
    statuses = [one.status for one in outcomes]
    assert statuses == ["failed"] * 3 + ["timed_out", "interrupted", "ok"]
    assert "ValueError: no idea" in outcomes[0].reason
    assert "their_agent.py" in outcomes[0].reason
    assert "cannot be sent back" in outcomes[1].reason
    assert "exited with code 7" in outcomes[2].reason
    assert "Too many open files: the agent raised ConnectionError: no" in outcomes[4].reason
    assert outcomes[5].reward == 2.0  # of a new process


def test_it_sees_of_the_environment_what_is_named(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("SEARCH_KEY", "k")
    note = tmp_path / "note"
    task = {"then": "environment", "note": str(note)}
    play(tmp_path, python, task)
    assert note.read_text() == "PATH"
    play(tmp_path, python, task, variables=["SEARCH_*"])
    assert note.read_text() == "PATH SEARCH_KEY"


def test_what_an_episode_started_ends_with_it(python: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    (outcome,) = play(tmp_path, python, {"then": "start", "note": str(note)})
    assert outcome.status == "ok", outcome.reason
    wait_for(lambda: not Path(f"/proc/{note.read_text()}/exe").exists())


def test_a_program_that_an_agent_starts_can_give_no_answer(python: str, tmp_path: Path) -> None:
    outcomes = play(tmp_path, python, {"then": "forge"}, {})
    assert [one.reward for one in outcomes] == [2.0, 4.0], outcomes[0].reason


def test_a_recipe_whose_agent_cannot_be_built_there_is_refused(python: str, tmp_path: Path) -> None:
    recipe = load_recipe(
        CHECKOUT / "recipes" / "quickstart.yaml",
        [
            "evaluation.sets=null",
            "rollout.agent.mode=subproc",
            f"rollout.agent.python={python}",
            "rollout.workflow=their_agent.Agent",
            "rollout.workflow_kwargs={reward: 1.0}",
        ],
    )
    pythons, folders = dict.fromkeys(("agents", "train"), sys.executable), (f"{tmp_path}/user",)
    assert list(find_user_code_problems(recipe, pythons, folders)) == []
    (problem,) = find_user_code_problems(recipe, pythons, ())
    assert "No module named 'their_agent'" in problem.message
    assert problem.key == "rollout.workflow"


def test_what_cannot_be_built_is_known_before_any_episode(python: str, tmp_path: Path) -> None:
    for path, workflow, said in (
        (python, "their_agent.Agnt", "has no attribute 'Agnt'"),
        (python, "no_such.Agent", "No module named 'no_such'"),
        (python, "their_agent.json", "has no `async def run"),
        ("/no/python", "their_agent.Agent", "no Python for the agent at /no/python"),
    ):
        how = AgentExecutionConfig(mode="subproc", python=path)
        agent = SubprocessAgent(workflow, {}, 1, how)
        with pytest.raises(RecipeError, match=said):
            asyncio.run(agent.check_agent_builds())
        agent.close()
