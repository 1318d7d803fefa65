"""A run whose held-out tasks are played by a job of their own, with kills on the way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.process_commands import find_processes
from tests.support.run_files import events_of, trained_steps
from tests.support.small_run import SmallRun, await_none_left, started_from

pytestmark = pytest.mark.timeout(600)

STEPS = 8
TASKS = 96
"""Enough for training to go on while they are played."""


def begun(paths: RunPaths) -> list[dict[str, Any]]:
    """The evaluations that began, in order."""
    return events_of(paths, "evaluation_begun")


def step_of(event: dict[str, Any]) -> int:
    return WeightVersion.parse(event["version"]).step


def rewards(paths: RunPaths) -> dict[int, float]:
    """Those in the metrics, by step."""
    lines = read_metrics(paths.metrics)
    return {line["step"]: line["eval/reward"] for line in lines if "eval/reward" in line}


def is_judging_earlier_weights(paths: RunPaths) -> bool:
    """Training has gone on while an evaluation is under way."""
    events = begun(paths)
    if not events or step_of(events[-1]) in rewards(paths):
        return False
    return step_of(events[-1]) < trained_steps(paths)


def process_of(paths: RunPaths, config: str) -> psutil.Process:
    """The one that runs by a configuration such as `evaluation/inference`."""
    return find_processes(paths.jobs_dir / f"{config}.json")[0]


def server_of(keeper: psutil.Process) -> psutil.Process:
    """Its SGLang."""
    engine = "areal_hpc.inference.cpu.sglang_cpu"
    return next(one for one in keeper.children() if engine in one.cmdline())


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(
        tmp_path / "runs",
        *started_from(model),
        "evaluation.separate_cell=true",
        f"evaluation.tasks={TASKS}",
        f"valid_dataset.kwargs.size={TASKS}",
        f"trainer.total_steps={STEPS}",
    )
    yield run
    if run.process is not None and run.process.poll() is None:  # the test failed on the way
        run.press_ctrl_c()
    await_none_left(run, 20.0)


def test_a_run_and_its_evaluations_outlive_trainer_and_evaluation_server(run: SmallRun) -> None:
    paths = run.paths
    run.start()
    run.await_true(lambda: is_judging_earlier_weights(paths))
    process_of(paths, "trainer/trainer").kill()
    run.await_true(lambda: begun(paths)[-1]["version"].startswith("2."))
    run.await_true(lambda: is_judging_earlier_weights(paths))
    judged = begun(paths)[-1]
    server_of(process_of(paths, "evaluation/inference")).kill()
    assert run.wait(400) == 0, run.said()

    lines = read_metrics(paths.metrics)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    found = rewards(paths)
    assert STEPS in found, run.said()
    for step, reward in found.items():
        result = json.loads(paths.evaluation(step).read_bytes())
        assert (result["n_tasks"], result["mean_reward"]) == (TASKS, reward)
        assert result["failures"] == {}
    assert set(found) <= {step_of(event) for event in begun(paths)}
    given_up = [event["given_up"] for event in begun(paths) if event["given_up"]]
    assert given_up == [judged["version"]] or step_of(judged) in found  # over just before the kill
    assert paths.list_attempts() == [1]
    logged = {path.name for path in paths.log_dir(1).glob("*")}
    assert logged == {"cell-0", "evaluation", "trainer"}
    assert run.audited() == f"trained_once={4 * STEPS} duplicates=0 lost=0 open=0"
