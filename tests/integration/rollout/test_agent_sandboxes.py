"""Episodes whose agents have sandboxes: one each, and none is left."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.execution.agent_sandboxes import check_sandbox_starts, make_agent_sandboxes
from areal_hpc.rollout.job import build_agent
from tests.integration.rollout.test_episode import TASK, finish, play_all, spec
from tests.support.waiting import wait_for

PATH = "tests.integration.rollout.sandbox_agents.Commanding"
WITH_SESSION = {"isolation": "bwrap", "sandbox": {"network": "session-only", "warm": 1}}


def make_spec(timeout_s: float = 60.0) -> EpisodeSpec:
    return dataclasses.replace(spec(timeout_s), data={**TASK})


async def play(
    run_dir: Path,
    how: AgentExecutionConfig,
    specs: list[EpisodeSpec],
    kwargs: dict[str, Any],
    path: str = PATH,
) -> list[EpisodeOutcome]:
    """Episodes side by side, as a driver runs them."""
    agent = build_agent(how, path, kwargs)
    assert agent is not None
    sandboxes = make_agent_sandboxes(how) if how.mode == "inline" else None
    outcomes, _ = await play_all(run_dir, agent, *specs, sandboxes=sandboxes)
    return outcomes


def read_sandboxes(note: Path) -> list[list[int]]:
    """Processes of each sandbox, as its agent noted them."""
    return [[int(pid) for pid in line.split()[1:]] for line in note.read_text().splitlines()]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()


@pytest.mark.parametrize("mode", ["inline", "subproc"])
def test_each_episode_has_a_sandbox_from_which_it_reaches_the_model(
    mode: str, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    how = AgentExecutionConfig.model_validate({"mode": mode, **WITH_SESSION})
    specs = [make_spec() for _ in range(3)]
    outcomes = finish(play(tmp_path, how, specs, {"note": str(note)}))
    assert [(one.status, one.reward) for one in outcomes] == [("ok", 1.0)] * 3, outcomes[0].reason
    used = read_sandboxes(note)
    assert len({pid for pids in used for pid in pids}) == sum(map(len, used))
    wait_for(lambda: not [pid for pids in used for pid in pids if is_running(pid)])


@pytest.mark.parametrize("mode", ["inline", "subproc"])
def test_an_episode_that_takes_too_long_leaves_nothing_of_its_sandbox(
    mode: str, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    how = AgentExecutionConfig.model_validate({"mode": mode, **WITH_SESSION})
    kwargs = {"note": str(note), "then": "hang"}
    (outcome,) = finish(play(tmp_path, how, [make_spec(8.0)], kwargs))
    assert outcome.status == "timed_out"
    (used,) = read_sandboxes(note)
    assert len(used) >= 3
    wait_for(lambda: not [pid for pid in used if is_running(pid)])  # killed, and on their way


def test_a_sandbox_that_an_agents_process_cannot_start_now_is_the_nodes(tmp_path: Path) -> None:
    how = AgentExecutionConfig.model_validate({"mode": "subproc", **WITH_SESSION})
    path = PATH.replace("Commanding", "CommandingOnLoadedNode")
    (outcome,) = finish(play(tmp_path, how, [make_spec()], {"note": str(tmp_path / "note")}, path))
    assert (outcome.status, outcome.is_node_short) == ("interrupted", True), outcome.reason
    assert "bwrap: no namespace: Resource temporarily unavailable" in outcome.reason
    assert "  try: " in outcome.reason


def test_a_task_that_has_something_in_the_sandbox_s_place_is_refused(tmp_path: Path) -> None:
    how = AgentExecutionConfig.model_validate(WITH_SESSION)
    taken = dataclasses.replace(make_spec(), data={**TASK, "sandbox": "mine"})
    with pytest.raises(RecipeError, match="rename the column"):
        finish(play(tmp_path, how, [taken], {"note": str(tmp_path / "note")}))


def test_a_root_file_system_that_is_not_there_is_refused() -> None:
    how = AgentExecutionConfig.model_validate({"isolation": "bwrap", "sandbox": {"root": "/no/x"}})
    with pytest.raises(RecipeError, match="there is no root file system /no/x"):
        check_sandbox_starts(how.model_dump())
