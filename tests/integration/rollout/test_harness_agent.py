"""Programs as agents: in a folder of their own, judged by what they left, and gone afterwards."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.agents.harness.harness_agent import HarnessAgent
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, EpisodeSpec
from areal_hpc.wire.reward import Reward
from tests.integration.rollout.test_agent_sandboxes import play
from tests.integration.rollout.test_episode import finish, spec
from tests.support.waiting import wait_for

PATH = "areal_hpc.agents.harness.harness_agent.HarnessAgent"
REWARD = f"{__name__}:judge"
PROGRAM = Path(__file__).with_name("harness_program.py")
SANDBOXED: dict[str, Any] = {"isolation": "bwrap", "sandbox": {"network": "session-only"}}


def judge(
    *, folder: Path, diff: str, exit_code: int, timed_out: bool, log: str, data: dict[str, Any]
) -> Reward:
    is_right = (folder / "answer.txt").read_text() == data["wanted"] and "+Answer: 4" in diff
    metrics: dict[str, float] = {
        "exit_code": exit_code, "timed_out": timed_out, "log": len(log)
    }  # fmt: skip
    return Reward(float(is_right and log.endswith("the end\n")), metrics=metrics, note=diff)


def make_task(folder: Path, how: str) -> dict[str, Any]:
    folder.mkdir()
    (folder / "answer.txt").write_text("?\n")
    (folder / "harness.py").write_text(PROGRAM.read_text())
    messages = [{"role": "user", "content": "2 + 2"}]
    return {"messages": messages, "folder": str(folder), "wanted": "?\nAnswer: 4\n", "how": how}


def is_left_behind(seconds: str) -> bool:
    told = f"sleep\0{seconds}\0".encode()
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if one.read_bytes() == told:
                return True
        except OSError:  # it has ended
            continue
    return False


@pytest.mark.parametrize("how", ["exit", "hang"])
@pytest.mark.parametrize("isolation", ["none", "bwrap"])
def test_a_program_is_judged_by_what_it_left_and_ends_with_its_episode(
    isolation: str, how: str, tmp_path: Path
) -> None:
    section = SANDBOXED if isolation == "bwrap" else {}
    task, seconds = make_task(tmp_path / "task", how), str(random.randrange(10**6, 10**9))
    kwargs = {
        "command": ["python3", "harness.py", "{task}", how],
        "reward": REWARD,
        "timeout_s": 8.0 if how == "hang" else 60.0,
        "variables": {"LEFT_BEHIND_S": seconds},
        "max_log_bytes": 100,
    }
    specs = [make_spec(task)]
    config = AgentExecutionConfig.model_validate(section)
    (outcome,) = finish(play(tmp_path / "run", config, specs, kwargs, PATH))
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.reason
    assert (tmp_path / "task" / "answer.txt").read_text() == "?\n"  # it worked in a copy
    wait_for(lambda: not is_left_behind(seconds))


def make_spec(task: dict[str, Any]) -> EpisodeSpec:
    return dataclasses.replace(spec(60.0), data=task)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"folder": "/nowhere"}, "there is no folder /nowhere"),
        ({"messages": []}, "expected a text"),
    ],
)
def test_a_task_that_is_none_fails_in_words(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    task = make_task(tmp_path / "task", "exit") | change
    kwargs = {"command": ["true"], "reward": REWARD}
    outcome: EpisodeOutcome
    (outcome,) = finish(
        play(tmp_path / "run", AgentExecutionConfig(), [make_spec(task)], kwargs, PATH)
    )
    assert outcome.status == "failed"
    assert said in outcome.reason


def test_a_sandbox_without_the_model_is_refused(tmp_path: Path) -> None:
    config = AgentExecutionConfig(isolation="bwrap")
    kwargs = {"command": ["true"], "reward": REWARD}
    specs = [make_spec(make_task(tmp_path / "task", "exit"))]
    (outcome,) = finish(play(tmp_path / "run", config, specs, kwargs, PATH))
    assert "rollout.agent.sandbox.network" in outcome.reason


def test_a_command_that_is_one_text_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        HarnessAgent("python3 x.py", REWARD)
    assert caught.value.problems[0].key == "rollout.workflow_kwargs.command"
