"""Shipped recipes, the tutorial and examples, run to their purpose on two CPU cores.

The quick start and its asynchronous form are in test_quickstart_learns.py, with three seeds.
"""

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.run_view import RunView
from examples.harbor.sums import write_tasks
from examples.online.chat import chat
from examples.repair_tasks.make import write_repair_tasks
from tests.acceptance.test_gyms import python_of as python_of_gym
from tests.support.commands import areal_hpc, run_program, said_by
from tests.support.environments import CHECKOUT, python_of
from tests.support.run_files import events_of
from tests.support.small_run import CUT_DOWN, SmallRun, await_none_left, started_from
from tests.support.sums import is_right

pytestmark = pytest.mark.timeout(4000)

CHECK_TIMEOUT_S = 600.0
"""Time limit for 64 tasks, twice each, in sandboxes."""
RUN_TIMEOUT_S = 3600.0
LEAST_GAIN = 0.3
"""Least gain of the held-out reward; each recipe's head says how much it was."""
LOGPROB_GAP = "logprob/engine_trainer_max_abs_diff"


def learn(recipe: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    command = ("run", f"recipes/{recipe}.yaml", f"cluster.fileroot={folder / 'runs'}", *overrides)
    said_by(areal_hpc(*command, timeout_s=RUN_TIMEOUT_S))
    (recipe_file,) = (folder / "runs").glob("*/*/recipe.yaml")
    paths = RunPaths(recipe_file.parent)
    said_by(areal_hpc("status", paths.root))  # exits with 1 for an alert that is a failure
    alerts = [(event["level"], event["rule"]) for event in events_of(paths, "alert")]
    assert not [alert for alert in alerts if alert[0] == "failure" or alert[1] == "reward_hacking"]
    rows = read_readable_records(paths.metrics)
    rewards = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert rewards[-1] - rewards[0] >= LEAST_GAIN, rewards
    return rows


@pytest.mark.parametrize(
    "recipe", ["disk_transport", "lora_adapter", "off_policy", "partial_groups"]
)
def test_a_recipe_learns_and_raises_no_failure(recipe: str, tmp_path: Path) -> None:
    learn(f"variants/{recipe}", tmp_path)


def test_commands_in_sandboxes_are_learned_on_harbors_tasks(tmp_path: Path) -> None:
    for name, count, seed in (("sums", 512, 1), ("sums-held-out", 64, 2)):
        write_tasks(tmp_path / name, count, seed)
    command = ("check-tasks", tmp_path / "sums-held-out")
    assert "64 tasks, 0 whose tests" in said_by(areal_hpc(*command, timeout_s=CHECK_TIMEOUT_S))
    tasks = {"train": tmp_path / "sums", "valid": tmp_path / "sums-held-out"}
    learn("cpu_harbor", tmp_path, *(f"{name}_dataset.path={path}" for name, path in tasks.items()))


def test_a_tiny_model_learns_to_repair_modules(tmp_path: Path) -> None:
    tasks = {"train": tmp_path / "swe", "valid": tmp_path / "swe-held-out"}
    modules = ("rotate", "second_largest", "greatest_divisor", "is_palindrome")
    write_repair_tasks(tasks["train"], 256, 1, modules)
    write_repair_tasks(tasks["valid"], 48, 2, modules)
    learn("cpu_swe", tmp_path, *(f"{name}_dataset.path={path}" for name, path in tasks.items()))


def test_a_tiny_model_learns_to_play_blackjack(tmp_path: Path) -> None:
    learn("cpu_blackjack", tmp_path, f"rollout.workflow_kwargs.python={python_of_gym('gymnasium')}")


def test_a_tiny_model_learns_with_a_coding_harness_to_look_before_it_writes(
    tmp_path: Path,
) -> None:
    gaps = [row[LOGPROB_GAP] for row in learn("cpu_harness", tmp_path) if LOGPROB_GAP in row]
    assert max(gaps) <= 1e-4


DOCUMENT = (CHECKOUT / "docs" / "tutorial.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(900)
def test_a_newcomer_trains_an_agent_of_their_own(tmp_path: Path) -> None:
    (agent, broken_agent), (recipe,) = blocks("python"), blocks("yaml")
    (tmp_path / "my_agent.py").write_text(agent)
    (tmp_path / "broken_agent.py").write_text(broken_agent)
    (tmp_path / "my_recipe.yaml").write_text(recipe)
    set_up, *commands = blocks("bash")
    assert "make setup" in set_up
    path = f"{python_of('agents').parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    for command in commands:
        if "BrokenAgent" in command:
            expect_the_mistake_to_be_named(command.splitlines(), tmp_path, environ)
            continue
        shell = ("bash", "-ec", command)
        said_by(run_program(*shell, folder=tmp_path, environ=environ, timeout_s=None))
    evaluations = RunView(RunPaths(tmp_path / "runs" / "tutorial" / "first")).evaluations
    assert evaluations[0][1] <= 0.3
    assert evaluations[-1][1] >= 0.9


def expect_the_mistake_to_be_named(
    lines: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> None:
    """The agent's trial, a run of it and `why` name line and error, and exit as documented."""
    for line, exit_code in zip(lines, (70, 70, 1), strict=True):
        answer = run_program(*line.split(), folder=folder, environ=environ, timeout_s=200)
        output = answer.stdout + answer.stderr
        assert answer.returncode == exit_code, output
        assert re.search(r"broken_agent\.py\D+17", output), output
        assert "'list' object has no attribute 'message'" in output


@pytest.mark.timeout(600)
def test_a_preempted_run_goes_on_and_trains_every_ticket_once(tmp_path: Path) -> None:
    done = run_program(
        *(python_of("main"), "examples/preemption/preempt.py", "recipes/quickstart.yaml"),
        *(f"cluster.fileroot={tmp_path}", *CUT_DOWN),
        environ={"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        timeout_s=None,
    )
    output = said_by(done)
    assert "preempted after step" in output
    assert "went on to step 3" in output
    assert output.splitlines()[-1] == "trained_once=12 duplicates=0 lost=0 open=0"


PROGRAMS = 8
STEPS = 2
GROUPS = 4


def come_and_go(run_dir: Path, is_over: threading.Event) -> int:
    """Talk again and again; return the number of talks that ended with a reward."""
    rewarded = 0
    while not is_over.is_set():
        with suppress(httpx.TransportError):  # the proxy comes and goes with the run
            if chat(run_dir, judged, max_tokens=48):
                rewarded += 1
                continue
        time.sleep(0.2)
    return rewarded


def judged(reply: str, task: dict[str, Any]) -> str:
    """Judge as a user who can add types."""
    return "y" if is_right(reply, task) else "n"


def test_an_online_run_trains_on_what_programs_do(model: Path, tmp_path: Path) -> None:
    run = SmallRun(
        tmp_path / "runs",
        *started_from(model),
        *("rollout.workflow=''", "rollout.agent.mode=online", "valid_dataset=null"),
        *(f"trainer.total_steps={STEPS}", "trainer.checkpoint_every_steps=1"),
    )
    is_over = threading.Event()
    with ThreadPoolExecutor(PROGRAMS) as pool:
        talks = [pool.submit(come_and_go, run.paths.root, is_over) for _ in range(PROGRAMS)]
        try:
            run.finish()
        finally:
            is_over.set()
    await_none_left(run, 20.0)
    trained = [row for row in read_readable_records(run.paths.metrics) if row["step"] > 0]
    assert [row["step"] for row in trained] == [*range(1, STEPS + 1)]
    assert all(row["tokens/trained"] > 0 for row in trained)
    assert sum(talk.result() for talk in talks) >= STEPS * GROUPS * 4
    assert run.audited() == f"trained_once={STEPS * GROUPS} duplicates=0 lost=0 open=0"
