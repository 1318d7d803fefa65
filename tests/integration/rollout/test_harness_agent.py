"""Programs act as agents in a folder of their own, are judged by its contents, and end."""

import dataclasses
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.agents.harness.harness_agent import (
    HarnessAgent,
    HarnessFolder,
    compute_program_timeout_s,
)
from areal_hpc.dataset.harbor.task_folder import read_task_folder
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.reward.harbor import HarborTask
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.sandbox.sandbox import SandboxSpec
from areal_hpc.wire.agent_reward import Reward
from examples.repair_tasks.make import write_repair_tasks
from tests.integration.rollout.test_episode import finish, spec
from tests.integration.rollout.test_subprocess_agent import play_in_sandboxes
from tests.support.deadlines import scaled
from tests.support.sandboxes import started
from tests.support.waiting import wait_for

PATH = "areal_hpc.agents.harness.harness_agent.HarnessAgent"
REWARD = f"{__name__}:judge"
PROGRAM = Path(__file__).with_name("harness_program.py")
SANDBOXED: dict[str, Any] = {"isolation": "bwrap", "sandbox": {"network": "session-only"}}


def judge(
    *, folder: Path, diff: str, exit_code: int, timed_out: bool, log: str, data: dict[str, Any]
) -> Reward:
    assert not is_left_behind(data["left_behind"]), "it could still write into the folder"
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
    command = f"sleep\0{seconds}\0".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == command:
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
    task["left_behind"] = seconds
    kwargs = {
        "command": ["python3", "harness.py", "{task}", how],
        "reward": REWARD,
        "timeout_s": scaled(8.0 if how == "hang" else 60.0),
        "variables": {"LEFT_BEHIND_S": seconds},
        "max_log_bytes": 100,
    }
    specs = [make_spec(task)]
    config = AgentExecutionConfig.model_validate(section)
    (outcome,) = finish(play_in_sandboxes(tmp_path / "run", config, specs, kwargs, PATH))
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.reason
    assert (tmp_path / "task" / "answer.txt").read_text() == "?\n"  # it worked in a copy
    wait_for(lambda: not is_left_behind(seconds))


def test_a_harbor_task_is_played_in_its_folder_and_judged_by_its_tests(tmp_path: Path) -> None:
    (folder,) = write_repair_tasks(tmp_path / "tasks", 1, seed=1)
    row = read_task_folder(folder)
    (solution,) = (folder / "solution").glob("*.py")
    script = 'printf %s "$ANSWER" > "$MODULE" && test -w "$HOME" && python3 -c "$PROGRAM" "$0" exit'
    without_log = f"{script}; code=$?; rm -rf /logs/agent; exit $code"
    variables = {"MODULE": solution.name, "PROGRAM": PROGRAM.read_text(), "LEFT_BEHIND_S": "60"}
    config = AgentExecutionConfig.model_validate(SANDBOXED)
    rewards = []
    right = solution.read_text()
    for number, (command, answer) in enumerate(
        ((script, right), (script, ""), (without_log, right), (without_log, ""))
    ):
        kwargs = {
            "command": ["/bin/sh", "-c", command, "{task}"],
            "timeout_s": scaled(60.0),
            "variables": {**variables, "ANSWER": answer},
        }
        (outcome,) = finish(
            play_in_sandboxes(tmp_path / str(number), config, [make_spec({**row})], kwargs, PATH)
        )
        assert outcome.status == "ok", outcome.reason
        rewards.append(outcome.reward)
    assert rewards == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("recipe_s", "task_s", "limit_s"),
    [(None, 1800.0, 1800.0), (60.0, 1800.0, 60.0), (540.0, 60.0, 60.0), (None, None, 540.0)],
)
def test_a_program_has_the_task_s_time_unless_the_recipe_sets_less(
    recipe_s: float | None, task_s: float | None, limit_s: float
) -> None:
    task = HarborTask(folder="/task", agent_timeout_s=task_s)
    assert compute_program_timeout_s(recipe_s, task) == limit_s


def make_spec(task: dict[str, Any]) -> EpisodeSpec:
    return dataclasses.replace(spec(scaled(60.0)), data=task)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": "/nowhere"}, "there is no folder /nowhere"),
        ({"messages": []}, "expected a text"),
        ({}, "nothing judges what the program leaves"),
    ],
)
def test_a_task_that_is_none_fails_in_words(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    task = make_task(tmp_path / "task", "exit") | change
    kwargs = {"command": ["true"], "reward": REWARD if change else ""}
    outcome: EpisodeOutcome
    (outcome,) = finish(
        play_in_sandboxes(tmp_path / "run", AgentExecutionConfig(), [make_spec(task)], kwargs, PATH)
    )
    assert outcome.status == "failed"
    assert message in outcome.reason


@pytest.mark.parametrize(
    ("harness", "message"),
    [
        ("opencoed", "there is no harness 'opencoed'; did you mean 'opencode'?"),
        ("opencode", "the harness opencode is not installed"),
    ],
)
def test_a_harness_that_is_not_there_is_refused_with_a_way_out(
    harness: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        HarnessAgent(harness=harness, reward=REWARD, harnesses_dir=str(tmp_path))
    (problem,) = caught.value.problems
    assert message in problem.message
    assert problem.key == "rollout.workflow_kwargs.harness"


WRITES_WHAT_IT_IS_TOLD = """#!/usr/bin/env python3
import json, os, pathlib, sys, urllib.request
home = pathlib.Path(os.environ["HOME"])
settings = (home / ".pi/agent/models.json").read_text()
told = "\\n".join([" ".join(sys.argv), os.getcwd(), str(home), settings])
pathlib.Path("told").write_text(told)
(session,) = json.loads(settings)["providers"].values()
body = {"model": "default", "messages": [{"role": "user", "content": sys.argv[-1]}]}
headers = {"authorization": "Bearer " + session["apiKey"], "content-type": "application/json"}
url = session["baseUrl"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


@pytest.mark.asyncio
async def test_a_program_whose_interpreter_is_not_shown_is_refused_with_its_name() -> None:
    async with started("none", SandboxSpec(network="open")) as sandbox:
        folder = HarnessFolder(sandbox)
        for name, first in (("shown", "/bin/sh"), ("hidden", "/no/such/python -P")):
            await sandbox.put(name, f"#!{first}\n", 0o755)
        for path in (f"{sandbox.folder}/shown", "/bin/sh"):
            await folder.check_program(path, "harness")
        for path, missing in (("hidden", "/no/such/python,"), ("absent", "/absent,")):
            with pytest.raises(RecipeError, match=f"does not show .*{missing}"):
                await folder.check_program(f"{sandbox.folder}/{path}", "harness")


@pytest.mark.asyncio
async def test_links_out_of_the_folder_and_pipes_are_not_copied(tmp_path: Path) -> None:
    commands = (
        "echo 4 > answer.txt; ln -s answer.txt within; ln -s /usr/bin/env absolute; mkfifo pipe; "
        "mkdir below; ln -s ../.. below/above; ln -s ../answer.txt below/answer"
    )
    async with started("none", SandboxSpec(network="open")) as sandbox:
        folder = HarnessFolder(sandbox)
        await folder.fill(None)
        words = ["/bin/sh", "-c", commands]
        assert (await folder.run_with_output_to_log(words, {}, 30.0)).exit_code == 0
        await folder.copy_to(tmp_path)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["answer.txt", "below", "below/answer", "within"]
    assert (tmp_path / "below/answer").read_text() == "4\n"


@pytest.mark.asyncio
async def test_the_diff_is_made_against_the_folder_whatever_the_program_left_beside_its_own(
    tmp_path: Path,
) -> None:
    task = tmp_path / "task"
    task.mkdir()
    (task / "answer.txt").write_text("?\n")
    (task / "empty").touch()
    forged = (
        "echo 4 > answer.txt; mkdir new; echo 5 > new/one; "
        "git --git-dir=../before.git --work-tree=. init -q; "
        "git --git-dir=../before.git config diff.external true; "
        "mkdir -p ../before ../../.config/git; cp * ../before; ln -s /etc/passwd ../diff; "
        "tar -cf ../before.tar answer.txt; echo '*' > ../../.config/git/ignore; "
        "printf '[diff]\\nexternal = true\\n' > ../../.gitconfig"
    )
    async with started("bwrap", SandboxSpec()) as sandbox:
        folder = HarnessFolder(sandbox)
        await folder.fill(task)
        assert await folder.compute_diff_against_source() == ""
        await folder.run_with_output_to_log(["/bin/sh", "-c", forged], {}, 30.0)
        diff = await folder.compute_diff_against_source()
    lines = diff.splitlines()
    assert [line for line in lines if line.startswith("diff ")] == [
        "diff --git a/answer.txt b/answer.txt",
        "diff --git a/new/one b/new/one",
    ]
    assert [line for line in lines if re.match(r"[+-]\S$|[+-]\?", line)] == ["-?", "+4", "+5"]


def judge_what_it_was_told(*, folder: Path, **others: Any) -> float:
    text = (folder / "told").read_text()
    arguments, work, home, settings = text.split("\n", 3)
    (provider,) = json.loads(settings)["providers"].values()
    assert arguments.endswith("--provider session --model default -p 2 + 2")
    assert (work.endswith("/harness/work"), home.endswith("/harness/home")) == (True, True)
    assert re.fullmatch(r"http://127.0.0.1:\d+/v1", provider["baseUrl"])
    assert re.fullmatch(r"[^$]+-1", provider["apiKey"])
    assert provider["models"][0]["contextWindow"] == 4321
    return 1.0


@pytest.mark.parametrize("isolation", ["none", "bwrap"])
def test_a_harness_is_pointed_at_its_session_by_files_in_a_home_of_its_own(
    isolation: str, tmp_path: Path
) -> None:
    # Folders that a sandbox's user may enter.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as programs:
        Path(programs).chmod(0o755)
        for word in ("node_modules/node/bin/node", "node_modules/.bin/pi"):
            path = Path(programs) / "pi" / word
            path.parent.mkdir(parents=True)
            path.write_text(WRITES_WHAT_IT_IS_TOLD)
            path.chmod(0o755)
        (Path(programs) / "pi" / ".installed").touch()  # an installation writes this last
        section = {}
        if isolation == "bwrap":
            section = {
                "isolation": "bwrap",
                "sandbox": {"network": "session-only", "readonly_folders": [programs]},
            }
        kwargs = {
            "harness": "pi",
            "reward": f"{__name__}:judge_what_it_was_told",
            "harnesses_dir": programs,
            "context_tokens": 4321,
        }
        specs = [make_spec(make_task(tmp_path / "task", "exit"))]
        config = AgentExecutionConfig.model_validate(section)
        (outcome,) = finish(play_in_sandboxes(tmp_path / "run", config, specs, kwargs, PATH))
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.reason
