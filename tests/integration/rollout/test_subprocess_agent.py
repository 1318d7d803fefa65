"""Agents in processes: what hangs or dies costs its own episode and is replaced."""

import asyncio
import dataclasses
import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.wire.agent_reward import Reward
from tests.integration.rollout.process_agents import Blocking, Misgraded
from tests.integration.rollout.standins import StandInProxy, driving
from tests.integration.rollout.test_episode import TASK, finish, spec
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
    async with StandInProxy(run_dir) as proxy, driving(run_dir) as (peer, http_client):
        episodes = (run_episode(one, agent, peer, http_client) for one in specs)
        outcomes = await asyncio.gather(*episodes)
    agent.close()
    return outcomes, proxy


async def play_any(run_dir: Path, agent: Any) -> list[EpisodeOutcome]:
    """One episode of an agent in whichever process."""
    async with StandInProxy(run_dir), driving(run_dir) as (peer, http_client):
        outcome = await run_episode(spec(), agent, peer, http_client)
    if isinstance(agent, SubprocessAgent):
        agent.close()
    return [outcome]


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


def test_the_blocking_sdk_needs_no_arguments(tmp_path: Path) -> None:
    workflow = PATH.replace("Blocking", "WithSdk")
    outcomes, _ = finish(play(tmp_path, SubprocessAgent(workflow, {}, 1), {}))
    assert [(one.status, one.reward) for one in outcomes] == [("ok", 0.25)]


GRADED = Reward(1.0, {"correct": 0.8, "format": 0.2}, {"reply_characters": 9})


def test_what_a_reward_was_made_of_crosses_the_pipe(tmp_path: Path) -> None:
    workflow = PATH.replace("Blocking", "Graded")
    outcomes, proxy = finish(play(tmp_path, SubprocessAgent(workflow, {}, 1), {}))
    assert [(one.status, one.reward) for one in outcomes] == [("ok", 1.0)]
    assert [one.given for one in proxy.sessions.values()] == [{"chatcmpl-0": GRADED}]


@pytest.mark.parametrize("in_process", [True, False], ids=["subproc", "inline"])
def test_a_reward_of_what_is_no_number_is_an_error_in_the_agents_line(
    tmp_path: Path, in_process: bool
) -> None:
    agent: Any = SubprocessAgent(PATH.replace("Blocking", "Misgraded"), {}, 1)
    if not in_process:
        agent.close()
        agent = Misgraded()
    (outcome,) = finish(play_any(tmp_path, agent))
    said = "the agent raised areal_hpc.errors.InvalidRewardError: parts.correct: expected a finite"
    assert outcome.status == "failed"
    assert outcome.reason.startswith(f"{said} float, got '4' (str)")
    assert 'return Reward(1.0, parts={"correct": data["answer"]})' in outcome.reason


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


def test_an_episode_whose_process_cannot_start_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", fail)  # as fork(2) does
    agent = SubprocessAgent(PATH, {}, 1)
    with pytest.raises(ClusterError, match="cannot be started"):
        finish(agent.check_agent_builds())
    outcomes, proxy = finish(play(tmp_path, agent, {}))
    assert [(one.status, one.is_node_short) for one in outcomes] == [("interrupted", True)]
    assert not proxy.sessions


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

    async def play_both() -> tuple[EpisodeOutcome, int]:
        ticks = 0
        async with StandInProxy(tmp_path) as _, driving(tmp_path) as (peer, http_client):
            data = {**TASK, "does": does, "note": str(note)}
            one = dataclasses.replace(
                spec(scaled(3.0) if said.startswith("took") else 60.0), data=data
            )
            playing = asyncio.ensure_future(run_episode(one, agent, peer, http_client))
            while not playing.done():
                await asyncio.sleep(0.05)
                ticks += 1
        agent.close()
        return playing.result(), ticks

    outcome, ticks = finish(play_both())
    assert outcome.status in ("failed", "timed_out")
    assert said in outcome.reason
    assert not note.exists()
    assert ticks > 10 or outcome.status != "timed_out", "the event loop went on"


@pytest.mark.parametrize("does", ["leaves a daemon", "leaves a daemon and hangs"])
def test_nothing_that_an_episode_started_outlives_it(does: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    agent = SubprocessAgent(HOSTILE, {}, 1)

    async def play_once() -> EpisodeOutcome:
        async with StandInProxy(tmp_path), driving(tmp_path) as (peer, http_client):
            data = {**TASK, "does": does, "note": str(note)}
            one = dataclasses.replace(spec(scaled(5.0)), data=data)
            return await run_episode(one, agent, peer, http_client)

    finish(play_once())
    daemon = int(note.read_text())
    wait_for(lambda: not is_running(daemon))
    agent.close()


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
