"""Harbor's tasks are played in sandboxes; tests enter after the agent, and are hard to cheat."""

import asyncio
import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.agents.harbor_agent import HarborAgent
from areal_hpc.dataset.harbor.task_folder import read_task_folder, read_task_folders
from areal_hpc.errors import NodeResourceShortageError, RecipeError
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.reward import harbor
from areal_hpc.reward.harbor import HarborTask, check_tasks_in_order, find_harbor_task
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.sandbox.runtimes import find_installed_runtimes, make_runtime
from areal_hpc.sandbox.sandbox import Sandbox, SandboxSpec
from areal_hpc.wire.agent_reward import Reward
from examples.repair_tasks.make import write_repair_tasks
from tests.integration.rollout.test_episode import finish
from tests.integration.rollout.test_subprocess_agent import make_spec, play_in_sandboxes
from tests.support.deadlines import scaled
from tests.support.gym_stage import GymStage, call_tool
from tests.support.root_file_system import make_root_file_system
from tests.support.sandboxes import started

PATH = "tests.integration.rollout.harbor_agents.Playing"
RUNTIMES = [name for name in find_installed_runtimes() if name != "none"]
MODULE = "running_total"
ANSWER = f"/app/{MODULE}.py"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harbor") / "tasks"
    write_repair_tasks(folder, 56, seed=2)
    return folder


def find_row(tasks: Path) -> dict[str, Any]:
    folder = min(tasks.glob(f"*-{MODULE.replace('_', '-')}"))
    return read_task_folder(folder)


async def time_out(*_: Any) -> None:
    raise TimeoutError("unpack: not done within 120 s")


@asynccontextmanager
async def prepared(row: dict[str, Any]) -> AsyncIterator[tuple[HarborTask, Sandbox]]:
    task = find_harbor_task(row)
    assert task is not None
    async with started("bwrap", task.apply_task_to_sandbox_spec(SandboxSpec())) as sandbox:
        await task.prepare(sandbox)
        yield task, sandbox


async def judge_after(row: dict[str, Any], *commands: str, is_loaded: bool = False) -> Reward:
    """Return the reward of an agent with these commands; `is_loaded`: unpacking tests times out."""
    async with prepared(row) as (task, sandbox):
        for command in commands:
            result = await sandbox.exec(command)
            assert result.exit_code == 0, result.text
        with pytest.MonkeyPatch.context() as patched:
            if is_loaded:
                patched.setattr(sandbox, "unpack", time_out)
            return await task.run_tests(sandbox)


@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.asyncio
async def test_solutions_are_right_and_nothing_is_wrong(name: str, tasks: Path) -> None:
    rows = read_task_folders(tasks, "x")[:3]
    checks = [
        task async for task in check_tasks_in_order(rows, make_runtime(name), SandboxSpec(), 2)
    ]
    assert all(task.has_discriminating_tests for task in checks)
    rewards = [(task.oracle.value, task.no_action_reward.value) for task in checks if task.oracle]
    assert rewards == [(1.0, 0.0)] * 3


@pytest.mark.parametrize("mode", ["inline", "subproc"])
def test_an_episode_has_the_task_s_files_and_is_judged_by_its_tests(
    mode: str, tasks: Path, tmp_path: Path
) -> None:
    how = AgentExecutionConfig.model_validate({"mode": mode, "isolation": "bwrap"})
    spec = dataclasses.replace(make_spec(), data=find_row(tasks))

    async def run(kwargs: dict[str, Any]) -> EpisodeOutcome:
        (outcome,) = await play_in_sandboxes(tmp_path, how, [spec], kwargs, PATH)
        return outcome

    solved = finish(run({}))
    assert (solved.status, solved.reward) == ("ok", 1.0), solved.reason


class WithSandbox:
    """Agent in an episode's sandbox, without a driver."""

    def __init__(self, agent: HarborAgent) -> None:
        self._agent = agent

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        async with prepared(data) as (_, sandbox):
            return await self._agent.run({**data, "sandbox": sandbox}, **extra_kwargs)


@pytest.mark.thorough
def test_a_model_repairs_a_module_by_commands(tasks: Path, tmp_path: Path) -> None:
    row = find_row(tasks)
    source = Path(row["harbor"]["folder"], "solution", f"{MODULE}.py").read_text()
    command = f"pwd; cat > {MODULE}.py <<'END'\n{source}END"
    lines = [
        call_tool("run_command", '{"cmd": "ls"}'),
        call_tool("run_command", json.dumps({"command": "sleep 60"})),
        call_tool("run_command", json.dumps({"command": command})),
        "It is repaired.",
    ]
    with closing(GymStage(tmp_path, lines)) as stage:
        reward = stage.play(WithSandbox(HarborAgent(command_timeout_s=scaled(0.5))), row)
    assert (reward.value, reward.metrics) == (1.0, {"no_verdict": 0.0, "tampered": 0.0})
    assert 'expected {"command": "..."}' in stage.prompts[1]
    assert "(was stopped, it took too long)" in stage.prompts[2]
    assert "/app\n\n(exit code 0)" in stage.prompts[3]


def test_a_runtime_without_roots_does_not_play_them(tasks: Path, tmp_path: Path) -> None:
    how = AgentExecutionConfig.model_validate({"isolation": "none"})
    spec = dataclasses.replace(make_spec(), data=find_row(tasks))
    with pytest.raises(RecipeError, match="need a sandbox"):
        finish(play_in_sandboxes(tmp_path, how, [spec], {}, PATH))


KEEP_WRITING = "while :; do echo 1.0 > /logs/verifier/reward.txt; done"
FORGERIES = {
    "a verdict written beforehand": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json",
    "a writer left behind": f"mkdir -p /logs/verifier; setsid sh -c '{KEEP_WRITING}' >&- 2>&- &",
    "a link to a verdict": (
        "mkdir -p /logs/verifier; echo 1 > /tmp/one; ln -s /tmp/one /logs/verifier/reward.txt"
    ),
    "tests in place": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "settings of Python at home": (
        "mkdir -p ~/.local/lib/python3.11/site-packages; for d in /workspace /app "
        "~/.local/lib/python3.11/site-packages; do echo 'import os; os._exit(0)' > "
        "$d/usercustomize.py; cp $d/usercustomize.py $d/sitecustomize.py; done"
    ),
    "an answer that leaves": f"echo 'import os; os._exit(0)' > {ANSWER}",
    "an answer that equals all": (
        f"printf 'class A(list):\\n def __eq__(s, o): return True\\n"
        f"def {MODULE}(n): return A()\\n' > {ANSWER}"
    ),
    "an answer that ends the judge": (
        "printf 'import os, signal\\n"
        'open("/logs/verifier/reward.txt", "w").write("1.0")\\n'
        f"os.kill(os.getppid(), signal.SIGKILL)\\n' > {ANSWER}"
    ),
    "an answer that goes on writing": (
        "printf 'import os, subprocess\\n"
        f'subprocess.Popen(["sh", "-c", "{KEEP_WRITING}"], start_new_session=True)\\n'
        f"def {MODULE}(n): return []\\n' > {ANSWER}"
    ),
    "an answer that writes the file which is read first": (
        """printf 'open("/logs/verifier/reward.json", "w").write("1")\n' > """ + ANSWER
    ),
    "an answer that has the judge fail": (
        "printf 'import os\n"
        'os.rename("/logs/verifier", "/logs/old"); os.mkdir("/logs/verifier")\n'
        'open("/logs/verifier/reward.txt", "w").write("1.0")\n'
        f'os.chmod("/logs/verifier", 0o555)\n\' > {ANSWER}'
    ),
    "an answer that looks for what is expected": (
        "printf 'import glob, json, os\\n"
        'found = glob.glob("/tests/*.json")\\n'
        'memory = open("/proc/%%d/mem" %% os.getppid(), "rb")\\n'
        f"def {MODULE}(n): return [n]\\n' > {ANSWER}"
    ),
}


BEFORE_THE_TESTS = {"a verdict written beforehand", "a link to a verdict", "tests in place"}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_verdict_is_worth_nothing_and_a_file_of_it_is_told(
    forgery: str, tasks: Path
) -> None:
    reward = finish(judge_after(find_row(tasks), FORGERIES[forgery]))
    assert reward.value == 0.0
    assert reward.metrics["tampered"] == 1.0 or forgery not in BEFORE_THE_TESTS


@pytest.mark.asyncio
async def test_no_process_of_the_judge_can_be_written_to(tasks: Path) -> None:
    """The answer sees the processes above it, and may open the memory of none of them."""
    looks = (
        "import os, pathlib\n"
        f"def {MODULE}(n):\n"
        "    for place in pathlib.Path('/proc').glob('[0-9]*/mem'):\n"
        "        if place.parent.name not in (str(os.getpid()), 'self'):\n"
        "            try: open(place, 'r+b'); pathlib.Path('/app/open').write_text(str(place))\n"
        "            except OSError: pass\n"
        "    return n\n"
    )
    async with prepared(find_row(tasks)) as (task, sandbox):
        await sandbox.put(ANSWER, looks)
        await task.run_tests(sandbox)
        assert (await sandbox.exec("test -e /app/open")).exit_code != 0


def test_tests_without_a_verdict_say_so(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = find_row(tasks)
    folder = tmp_path / "task"
    subprocess.run(["cp", "-r", row["harbor"]["folder"], folder], check=True)
    for script, message in (
        (
            "echo nothing to judge",
            "wrote no /logs/verifier/reward.txt or reward.json; they printed: nothing to judge",
        ),
        ("sleep 60", "took longer than 1 s"),
        ("echo much > /logs/verifier/reward.txt", "holds no reward"),
        (
            "echo 1.0 > /logs/verifier/reward.txt; exit 3",
            "(exit code 3); no output",
        ),
    ):
        (folder / "tests/test.sh").write_text(script)
        timeout_s = 1.0 if script.startswith("sleep") else 60.0
        row["harbor"] |= {"folder": str(folder), "test_timeout_s": timeout_s}
        reward = finish(judge_after(row))
        assert (reward.value, reward.metrics) == (0.0, {"no_verdict": 1.0, "tampered": 0.0})
        assert message in reward.note
    with pytest.raises(NodeResourceShortageError, match="could not be put into its sandbox"):
        finish(judge_after(row, is_loaded=True))
    shutil.rmtree(folder / "tests")
    monkeypatch.setattr(harbor, "READ_RETRY_S", 0.0)
    with pytest.raises(
        NodeResourceShortageError, match="the files of a Harbor task cannot be read"
    ):
        finish(judge_after(row))  # no fault of the agent, which would be trained with 0


def test_a_root_file_system_in_a_tar_is_unpacked_once_per_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_root_file_system(tmp_path / "root")
    archive = tmp_path / "rootfs.tar.gz"
    subprocess.run(["tar", "-C", root, "-czf", archive, "."], check=True)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    monkeypatch.setattr(tempfile, "tempdir", str(cache))

    async def look() -> bytes:
        spec = SandboxSpec(archive, writable_folders=("/logs", "/tests"))
        async with started("bwrap", spec) as sandbox:
            return (await sandbox.exec("cat /etc/os-release; touch /tests/x /etc/y")).stdout

    async def look_at_once() -> list[bytes]:
        return [*await asyncio.gather(look(), look())]

    assert finish(look_at_once()) == [b"NAME=small\n"] * 2
    (unpacked,) = [path for path in cache.glob("*/*") if path.is_dir()]
    assert not (unpacked / "etc/y").exists()
    archive.write_bytes(b"nothing")
    with pytest.raises(RecipeError, match="no archive of a root file system"):
        finish(look())
