"""An agent that hangs or dies in a process or sandbox costs its episode, and none is left."""

import asyncio
import dataclasses
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.checks.inputs import find_user_code_problems
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.execution.agent_sandboxes import check_sandbox_starts, make_agent_sandboxes
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rollout.job import build_agent
from areal_hpc.wire.agent_reward import Reward
from tests.integration.rollout.standins import StandInProxy
from tests.integration.rollout.test_episode import TASK, finish, play_all, spec
from tests.support.commands import write_program
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.process_commands import is_running
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
        if then == "exit":
            sys.exit(2)
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
        if then == "describe":
            told = {
                "modules": sorted(sys.modules), "now": dict(os.environ),
                # As the process began: what was taken out later could be read there.
                "began": open("/proc/self/environ").read(),
            }
            open(data["note"], "w").write(json.dumps(told))
        return Verdict() if then == "verdict" else self.reward * self.runs
"""


def make_other_python(folder: Path) -> str:
    return str(write_program(folder / "python", f'exec {sys.executable} -S -E "$@"'))


@pytest.fixture(params=["own", "other"])
def python(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an agent's interpreter, which finds the agent; empty: the driver's."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "their_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path / "user")
    return make_other_python(tmp_path) if request.param == "other" else ""


def play(
    run_dir: Path, python: str, *tasks: dict[str, Any], **how: Any
) -> tuple[list[EpisodeOutcome], StandInProxy]:
    """Play an episode for each task, one after the other in one process."""
    config = AgentExecutionConfig.model_validate(
        {"mode": "subproc", "python": python, "subproc_max_workers": 1, **how}
    )
    agent = build_agent(config, "their_agent.Agent", {"reward": 2.0})
    assert isinstance(agent, SubprocessAgent)
    specs = [
        dataclasses.replace(
            spec(scaled(2.0) if task.get("then") == "hang" else 60.0), data={**TASK, **task}
        )
        for task in tasks
    ]

    async def build_and_play() -> tuple[list[EpisodeOutcome], StandInProxy]:
        await agent.check_agent_builds()
        return await play_all(run_dir, agent, *specs)

    return finish(build_and_play())


def test_a_process_builds_the_agent_once_and_runs_one_episode_at_a_time(
    python: str, tmp_path: Path
) -> None:
    outcomes, proxy = play(tmp_path, python, {}, {}, {"then": "verdict"})
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3, outcomes[0].reason
    assert [outcome.reward for outcome in outcomes] == [2.0, 4.0, 0.5]
    assert outcomes[2].answer == "42"
    *_, session = proxy.sessions.values()
    expected = Reward(0.5, {"half": 0.5}, {"calls": 1}, "a note", "42")
    assert session.given == {"chatcmpl-0": expected}
    assert proxy.most_open == 1


def test_what_hangs_dies_or_raises_costs_its_own_episode_only(python: str, tmp_path: Path) -> None:
    thens = ("raise", "object", "leave", "exit", "hang", "run short", "")
    outcomes, _ = play(tmp_path, python, *({"then": then} for then in thens))
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == ["failed"] * 4 + ["timed_out", "interrupted", "ok"]
    messages = ("ValueError: no idea", "cannot be sent back", "exited with code 7", "SystemExit: 2")
    for outcome, text in zip(outcomes, messages, strict=False):
        assert text in outcome.reason
    assert "their_agent.py" in outcomes[0].reason
    assert "Too many open files" in outcomes[5].reason
    assert outcomes[5].is_node_short
    assert outcomes[6].reward == 2.0  # of a new process


def test_its_environment_leads_sdks_to_the_session_and_has_what_is_named_besides(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SEARCH_KEY", "k")
    note = tmp_path / "note"
    task = {"then": "describe", "note": str(note)}
    _, proxy = play(tmp_path, python, task, variables=["SEARCH_*"])
    report = json.loads(note.read_text())
    assert ("areal_hpc" in report["modules"]) is not bool(python)
    began = {line.split("=", 1)[0] for line in report["began"].split("\0")}
    assert {"SEARCH_KEY", "PATH"} <= began
    assert not {"HF_TOKEN", "PYTEST_VERSION"} & began
    (key,) = proxy.sessions
    url = report["now"]["ANTHROPIC_BASE_URL"]
    assert url.startswith("http://")
    assert not url.endswith("/v1")
    assert report["now"]["OPENAI_BASE_URL"] == f"{url}/v1"
    assert report["now"]["OPENAI_API_KEY"] == report["now"]["ANTHROPIC_API_KEY"] == key


def test_what_an_episode_started_ends_with_it(python: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    (outcome,), _ = play(tmp_path, python, {"then": "start", "note": str(note)})
    assert outcome.status == "ok", outcome.reason
    wait_for(lambda: not is_running(int(note.read_text())))


def test_a_program_that_an_agent_starts_can_give_no_answer(python: str, tmp_path: Path) -> None:
    outcomes, _ = play(tmp_path, python, {"then": "forge"}, {})
    assert [outcome.reward for outcome in outcomes] == [2.0, 4.0], outcomes[0].reason


def test_what_cannot_be_built_is_known_before_any_episode(python: str) -> None:
    for path, workflow, message in (
        (python, "their_agent.Agnt", "Agnt"),
        (python, "no_such.Agent", "no_such"),
        (python, "their_agent.Verdict", "run"),
        ("/no/python", "their_agent.Agent", "no Python for the agent at /no/python"),
    ):
        how = AgentExecutionConfig(mode="subproc", python=path)
        agent = SubprocessAgent(workflow, {}, 1, how)
        with pytest.raises(RecipeError, match=message):
            asyncio.run(agent.check_agent_builds())
        agent.close()


@pytest.mark.parametrize("python", ["other"], indirect=True)
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


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("returns an object with code", "cannot be sent back from a worker process"),
        ("answers half a message", "took longer than"),
        ("answers no JSON", "the answer of the worker process cannot be read"),
        ("answers too much", "the worker process answered more than 16 MiB"),
        ("leaves a daemon and hangs", "took longer than"),
    ],
)
def test_what_a_worker_sends_is_never_code_and_holds_up_no_other_episode(
    does: str, message: str, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    agent = SubprocessAgent("tests.integration.rollout.process_agents.Hostile", {}, 2)

    async def play_and_tick() -> tuple[EpisodeOutcome, int]:
        data = {**TASK, "does": does, "note": str(note)}
        timeout_s = scaled(3.0) if message.startswith("took") else 60.0
        episode = dataclasses.replace(spec(timeout_s), data=data)
        playing, ticks = asyncio.ensure_future(play_all(tmp_path, agent, episode)), 0
        while not playing.done():
            await asyncio.sleep(0.05)
            ticks += 1
        (outcome,), _ = playing.result()
        return outcome, ticks

    outcome, ticks = finish(play_and_tick())
    assert outcome.status in ("failed", "timed_out")
    assert message in outcome.reason
    assert ticks > 10 or outcome.status != "timed_out", "the event loop went on"
    if "daemon" in does:
        wait_for(lambda: not is_running(int(note.read_text())))
    else:
        assert not note.exists()


PATH = "tests.integration.rollout.sandbox_agents.Commanding"
WITH_SESSION: dict[str, Any] = {
    "isolation": "bwrap",
    "sandbox": {"network": "session-only", "warm": 1},
}


def make_spec(timeout_s: float = 60.0) -> EpisodeSpec:
    return dataclasses.replace(spec(timeout_s), data={**TASK})


async def play_in_sandboxes(
    run_dir: Path,
    how: AgentExecutionConfig,
    specs: list[EpisodeSpec],
    kwargs: dict[str, Any],
    path: str = PATH,
) -> list[EpisodeOutcome]:
    """Play episodes side by side, as a driver runs them."""
    agent = build_agent(how, path, kwargs)
    assert agent is not None
    sandboxes = make_agent_sandboxes(how) if how.mode == "inline" else None
    outcomes, _ = await play_all(run_dir, agent, *specs, sandboxes=sandboxes)
    return outcomes


def read_sandboxes(note: Path) -> list[list[int]]:
    return [[int(pid) for pid in line.split()[1:]] for line in note.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["inline", "subproc"])
def test_each_episode_has_a_sandbox_from_which_it_reaches_the_model(
    mode: str, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    how = AgentExecutionConfig.model_validate({"mode": mode, **WITH_SESSION})
    specs = [make_spec() for _ in range(3)]
    outcomes = finish(play_in_sandboxes(tmp_path, how, specs, {"note": str(note)}))
    assert [(end.status, end.reward) for end in outcomes] == [("ok", 1.0)] * 3, outcomes[0].reason
    used = read_sandboxes(note)
    assert len({pid for pids in used for pid in pids}) == sum(map(len, used))
    wait_for(lambda: not [pid for pids in used for pid in pids if is_running(pid)])


def test_files_are_kept_and_too_large_ones_cost_no_episode(tmp_path: Path) -> None:
    kwargs = {"note": str(tmp_path / "note"), "writes": 2 << 20}
    for pattern, kept in {"left": ["left"], "**/*": []}.items():
        kept_files_dir = tmp_path / str(len(kept))
        sandbox = {**WITH_SESSION["sandbox"], "keep_files": [pattern]}
        how = AgentExecutionConfig.model_validate({**WITH_SESSION, "sandbox": sandbox})
        spec = dataclasses.replace(make_spec(), kept_files_dir=kept_files_dir)
        (outcome,) = finish(play_in_sandboxes(tmp_path, how, [spec], kwargs))
        assert (outcome.status, outcome.reward) == ("ok", 1.0)
        names = list[str]()
        for archive in kept_files_dir.glob("*.tar"):
            with tarfile.open(archive) as files:
                names += files.getnames()
        assert names == kept


@pytest.mark.parametrize("mode", ["inline", "subproc"])
def test_an_episode_that_takes_too_long_leaves_nothing_of_its_sandbox(
    mode: str, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    how = AgentExecutionConfig.model_validate({"mode": mode, **WITH_SESSION})
    kwargs = {"note": str(note), "then": "hang"}
    (outcome,) = finish(play_in_sandboxes(tmp_path, how, [make_spec(8.0)], kwargs))
    assert outcome.status == "timed_out"
    (used,) = read_sandboxes(note)
    assert len(used) >= 3
    wait_for(lambda: not [pid for pid in used if is_running(pid)])  # killed, and on their way


def test_a_sandbox_that_an_agents_process_cannot_start_now_is_the_nodes(tmp_path: Path) -> None:
    how = AgentExecutionConfig.model_validate({"mode": "subproc", **WITH_SESSION})
    path = PATH.replace("Commanding", "CommandingOnLoadedNode")
    (outcome,) = finish(
        play_in_sandboxes(tmp_path, how, [make_spec()], {"note": str(tmp_path / "note")}, path)
    )
    assert (outcome.status, outcome.is_node_short) == ("interrupted", True), outcome.reason
    assert "bwrap: no namespace: Resource temporarily unavailable" in outcome.reason
    assert "  try: " in outcome.reason


def test_a_task_that_has_something_in_the_sandbox_s_place_is_refused(tmp_path: Path) -> None:
    how = AgentExecutionConfig.model_validate(WITH_SESSION)
    spec = dataclasses.replace(make_spec(), data={**TASK, "sandbox": "mine"})
    with pytest.raises(RecipeError, match="rename the column"):
        finish(play_in_sandboxes(tmp_path, how, [spec], {"note": str(tmp_path / "note")}))


def test_a_root_file_system_that_is_not_there_is_refused() -> None:
    how = AgentExecutionConfig.model_validate({"isolation": "bwrap", "sandbox": {"root": "/no/x"}})
    with pytest.raises(RecipeError, match="there is no root file system /no/x"):
        check_sandbox_starts(how.model_dump())
