"""Alerts of runs that learn nothing, told by the trainer and by those who look at the run."""

import shutil
from pathlib import Path

import pytest
import yaml

from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.live_progress import PlainReporter
from tests.support.commands import exit_code_of
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, TRAINER, record_run, write_recipe

STEPS = 4
SETTINGS = {"total_steps": STEPS}
CONSTANT = [0.5] * SAMPLES
RULES = {"off": ["engine_mismatch"]}
"""The recorded engine's log-probabilities are random numbers."""


def write_alerts(paths: RunPaths, **rules: object) -> None:
    """The recipe of a recorded run, with a section of alerts."""
    write_recipe(paths, {**TRAINER, **SETTINGS})
    with paths.recipe.open("a") as recipe:
        yaml.safe_dump({"alerts": rules}, recipe)


def train(ranks: RankServer, paths: RunPaths) -> RunPaths:
    """Train a recorded run's batches, as `areal-hpc replay` does."""
    write_alerts(paths, **RULES)
    outcome = ranks.run(paths, "replay", trainer=SETTINGS)
    assert outcome.codes == [0], outcome.log
    return paths


@pytest.fixture(scope="module")
def trained(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPaths]:
    """A run whose agents always return the same reward, and one whose rewards vary."""
    root = tmp_path_factory.mktemp("runs")
    constant = record_run(root / "constant" / "run", STEPS, rewards=dict.fromkeys(
        range(1, STEPS + 1), CONSTANT))  # fmt: skip
    return {
        "constant": train(ranks, constant),
        "varied": train(ranks, record_run(root / "varied" / "run", STEPS)),
    }


def test_a_constant_reward_is_a_failure_after_three_steps(
    trained: dict[str, RunPaths], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(Path(shutil.copytree(trained["constant"].root, tmp_path / "run")))
    rows = read_metrics(paths.metrics)
    assert [row["groups/zero_variance"] for row in rows] == [1.0] * STEPS
    paths.metrics.unlink()
    for row in rows[:3]:
        assert exit_code_of("status", paths.root) == 0
        append_line(paths.metrics, row)
    capfd.readouterr()
    assert exit_code_of("status", paths.root) == 1
    said = "failure  steps 1 to 3 taught nothing: no reply has an advantage in 100% of groups"
    assert said in capfd.readouterr().out


@pytest.mark.parametrize("command", ["status", "why"])
def test_status_and_why_exit_with_1_for_a_failure_and_say_it(
    trained: dict[str, RunPaths], command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, expected in (("constant", 1), ("varied", 0)):
        paths = trained[name]
        paths.finished_marker.touch()
        assert exit_code_of(command, paths.root) == expected, name
        assert ("taught nothing" in capfd.readouterr().out) == bool(expected)


def test_run_prints_an_alert_once_below_the_step_that_raised_it(
    trained: dict[str, RunPaths], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    reporter = PlainReporter(paths, STEPS, 0)
    shutil.copy(trained["constant"].recipe, paths.recipe)
    for row in read_metrics(trained["constant"].metrics):
        append_line(paths.metrics, row)
        reporter.report_new_steps()
    reporter.close()
    told = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["step", "step", "step", "failure", "step"]
