"""Agents in processes: what hangs or dies costs its own episode and is replaced."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.wire.agent_reward import Reward
from tests.integration.rollout.process_agents import Blocking
from tests.integration.rollout.standins import StandInProxy
from tests.integration.rollout.test_episode import TASK, finish, play_all, spec
from tests.support.deadlines import scaled
from tests.support.waiting import wait_for

PATH = "tests.integration.rollout.process_agents.Blocking"
HANG_S = scaled(2.0)
"""The limit of an episode that hangs; others have a minute."""


async def play(
    run_dir: Path, agent: SubprocessAgent, *tasks: dict[str, Any]
) -> tuple[list[EpisodeOutcome], StandInProxy]:
    """One episode per task, side by side."""
    specs = [
        dataclasses.replace(
            spec(HANG_S if task.get("then") == "hang" else 60.0), data={**TASK, **task}
        )
        for task in tasks
    ]
    return await play_all(run_dir, agent, *specs)


@pytest.mark.parametrize("workflow", [PATH, Blocking, Blocking(0.5)], ids=["path", "class", "self"])
def test_an_agent_given_in_any_way_runs_in_a_process_whose_environment_leads_sdks_to_the_session(
    workflow: Any, tmp_path: Path
) -> None:
    kwargs = {} if isinstance(workflow, Blocking) else {"reward": 0.5}
    note = tmp_path / "note"
    task = {"then": "environment", "note": str(note)}
    outcomes, proxy = finish(play(tmp_path, SubprocessAgent(workflow, kwargs, 1), task))
    assert [(one.status, one.reward) for one in outcomes] == [("ok", 0.5)], outcomes[0].reason
    ((key, session),) = proxy.sessions.items()
    assert session.rewards == {"chatcmpl-0": 0.5}
    told = dict(line.split("=", 1) for line in note.read_text().splitlines())
    url = told["ANTHROPIC_BASE_URL"]
    assert url.startswith("http://")
    assert not url.endswith("/v1")
    assert told == {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
    }


def test_an_agent_sees_of_the_environment_what_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SEARCH_KEY", "k")
    how = AgentExecutionConfig(mode="subproc", variables=("SEARCH_*",))
    note = tmp_path / "note"
    task = {"then": "first environment", "note": str(note)}
    outcomes, _ = finish(play(tmp_path, SubprocessAgent(PATH, {}, 1, how), task))
    assert outcomes[0].status == "ok", outcomes[0].reason
    # As the process began: what was taken out later could be read there.
    began = {line.split("=", 1)[0] for line in note.read_text().split("\0")}
    assert {"SEARCH_KEY", "PATH"} <= began
    assert not {"HF_TOKEN", "PYTEST_VERSION"} & began


GRADED = Reward(1.0, {"correct": 0.8, "format": 0.2}, {"reply_characters": 9})


def test_what_a_reward_was_made_of_crosses_the_pipe(tmp_path: Path) -> None:
    workflow = PATH.replace("Blocking", "Graded")
    outcomes, proxy = finish(play(tmp_path, SubprocessAgent(workflow, {}, 1), {}))
    assert [(one.status, one.reward) for one in outcomes] == [("ok", 1.0)]
    assert [one.given for one in proxy.sessions.values()] == [{"chatcmpl-0": GRADED}]


def test_what_hangs_crashes_or_raises_costs_its_own_episode_only(tmp_path: Path) -> None:
    endings = ("hang", "crash", "raise", "exit", "run short", None, None, None)
    tasks = [{"then": then} for then in endings]
    outcomes, _ = finish(play(tmp_path, SubprocessAgent(PATH, {}, 2), *tasks))
    statuses = [one.status for one in outcomes]
    assert statuses == ["timed_out", *["failed"] * 3, "interrupted", *["ok"] * 3]
    assert "exited with code 7" in outcomes[1].reason
    assert "the agent raised ValueError: no idea" in outcomes[2].reason
    assert "process_agents.py" in outcomes[2].reason
    assert "SystemExit: 2" in outcomes[3].reason
    assert "Too many open files while the agent ran" in outcomes[4].reason
    assert outcomes[4].is_node_short


def test_a_process_builds_the_agent_once_and_runs_one_episode_at_a_time(tmp_path: Path) -> None:
    note = tmp_path / "note"
    tasks = [{"then": "overlap", "note": str(note)}] * 3
    outcomes, proxy = finish(play(tmp_path, SubprocessAgent(PATH, {}, 1), *tasks))
    assert [one.status for one in outcomes] == ["ok"] * 3
    assert note.read_text().split() == ["begin", "end"] * 3
    assert proxy.most_open == 1
    assert sorted(one.reward for one in outcomes) == [1.0, 2.0, 3.0]


def test_an_agent_that_cannot_be_built_is_known_before_any_episode() -> None:
    for name, said in (("Unbuildable", "no license"), ("Blockingx", "did you mean 'Blocking'")):
        agent = SubprocessAgent(PATH.replace("Blocking", name), {}, 1)
        with pytest.raises(RecipeError, match=said):
            finish(agent.check_agent_builds())
        agent.close()


HOSTILE = PATH.replace("Blocking", "Hostile")


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("returns an object with code", "cannot be sent back from a worker process"),
        ("answers half a message", "took longer than"),
        ("answers no JSON", "what the worker process answered cannot be read"),
        ("answers too much", "the worker process answered more than 16 MiB"),
    ],
)
def test_what_a_worker_sends_is_never_code_and_holds_up_no_other_episode(
    does: str, said: str, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    agent = SubprocessAgent(HOSTILE, {}, 2)

    async def play_and_tick() -> tuple[EpisodeOutcome, int]:
        data = {**TASK, "does": does, "note": str(note)}
        timeout_s = scaled(3.0) if said.startswith("took") else 60.0
        one = dataclasses.replace(spec(timeout_s), data=data)
        playing, ticks = asyncio.ensure_future(play_all(tmp_path, agent, one)), 0
        while not playing.done():
            await asyncio.sleep(0.05)
            ticks += 1
        (outcome,), _ = playing.result()
        return outcome, ticks

    outcome, ticks = finish(play_and_tick())
    assert outcome.status in ("failed", "timed_out")
    assert said in outcome.reason
    assert not note.exists()
    assert ticks > 10 or outcome.status != "timed_out", "the event loop went on"


@pytest.mark.parametrize("does", ["leaves a daemon", "leaves a daemon and hangs"])
def test_nothing_that_an_episode_started_outlives_it(does: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    data = {**TASK, "does": does, "note": str(note)}
    one = dataclasses.replace(spec(scaled(5.0)), data=data)
    finish(play_all(tmp_path, SubprocessAgent(HOSTILE, {}, 1), one))
    daemon = int(note.read_text())
    wait_for(lambda: not is_running(daemon))


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
