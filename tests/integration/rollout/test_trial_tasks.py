"""Before a new run takes tickets, its agent plays some tasks before the real proxy."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import AgentError
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.launch.trial.cell import open_trial_cell
from areal_hpc.launch.trial.start import TrialConfig
from areal_hpc.proxy.config import ProxyJobConfig
from areal_hpc.rollout import trial_episodes
from areal_hpc.rollout.config import RolloutJobConfig
from areal_hpc.rollout.episodes.http_client import make_http_client
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import ensure_service_key, format_proxy_name
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from tests.integration.rollout.test_episode import ask
from tests.support.deadlines import scaled
from tests.support.role_recipe import write_role_recipe

TASKS = [{"messages": [{"role": "user", "content": "hello"}], "number": n} for n in range(8)]


class CountingAgent:
    """Fails in the tasks that it is told to fail in, and takes its time."""

    def __init__(self, failing: tuple[int, ...] = (), seconds: float = 0.0) -> None:
        self.failing, self.seconds = failing, seconds
        self.played: list[int] = []

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        self.played.append(data["number"])
        await ask(extra_kwargs)
        await asyncio.sleep(self.seconds)
        if data["number"] in self.failing:
            raise KeyError("anwser")
        return 1.0


@pytest.fixture
def config(tmp_path: Path) -> TrialConfig:
    make_tiny_model(tmp_path / "model", ["hello"], hidden=32, heads=2, kv_heads=2, head_dim=16)
    write_role_recipe(RunPaths(tmp_path), rollout={"workflow": "given", "max_episode_tries": 2})
    proxy = ProxyJobConfig(run_dir=tmp_path, cell="cell-0", model_path=tmp_path / "model")
    driver = RolloutJobConfig(run_dir=tmp_path, cell="cell-0")
    return TrialConfig(proxy=proxy, driver=driver)


def play(config: TrialConfig, agent: CountingAgent) -> list[dict[str, Any]]:
    """Play the trial tasks; the events that they leave."""
    paths = RunPaths(config.driver.run_dir)

    async def play_tasks() -> None:
        key = ensure_service_key(paths.service_key)
        proxy = AsyncServiceClient(paths.rendezvous_dir, format_proxy_name("cell-0"), key)
        http_client = make_http_client(60.0)
        tasks = TaskSet(Path("tasks.jsonl"), [json.dumps(task).encode() for task in TASKS])
        events = EventLog(paths.events, "driver-cell-0")
        try:
            await trial_episodes.play_trial_tasks(
                config.driver.recipe.rollout, agent, tasks, proxy, http_client, events
            )
        finally:
            await http_client.aclose()
            await proxy.close()

    with open_trial_cell(config):
        asyncio.run(asyncio.wait_for(play_tasks(), scaled(60)))
    return list(read_readable_records(paths.events))


def test_an_agent_that_works_is_let_through(config: TrialConfig) -> None:
    agent = CountingAgent()
    assert play(config, agent) == []
    assert sorted(agent.played) == [0, 1, 2]


def test_an_agent_that_fails_all_trials_alike_ends_the_run(config: TrialConfig) -> None:
    agent = CountingAgent(failing=(0, 1, 2))
    with pytest.raises(AgentError, match="failed all 3 trial tasks, 2 times each") as failed:
        play(config, agent)
    assert "KeyError: 'anwser'" in str(failed.value)
    assert failed.value.exit_code == 70
    assert sorted(agent.played) == [0, 0, 1, 1, 2, 2]
    events = list(read_readable_records(RunPaths(config.driver.run_dir).events))
    assert [event["event"] for event in events] == ["episode_failed"] * 6
    assert {event["trial"] for event in events} == {0, 1, 2}
    assert "test_trial_tasks.py" in events[0]["reason"], "it has the line"


def test_long_episodes_hold_nothing_up(
    config: TrialConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_episodes, "ALL_TRIALS_TIMEOUT_S", 0.5)
    assert play(config, CountingAgent(seconds=30.0)) == []
