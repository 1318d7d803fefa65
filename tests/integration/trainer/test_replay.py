"""`areal-hpc replay` trains recorded steps again, and alerts name steps that taught nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from areal_hpc.errors import RecipeError, ShardError
from areal_hpc.jobs.processes.process_setup import StopEvent
from areal_hpc.launch.replay import (
    RecordedStepsReplay,
)
from areal_hpc.metrics.step_metrics import find_metric, read_metrics
from areal_hpc.rundir.jsonl import append_line, read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.live_progress import PlainReporter
from tests.support.commands import exit_code_of
from tests.support.environments import CHECKOUT
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, TRAINER, record_run, write_recipe
from tests.support.replayed_run import record_routed_run
from tests.support.run_files import list_files

STEPS = 6
SETTINGS = {"total_steps": STEPS, "minibatches": 3}


@pytest.fixture(scope="module")
def recorded(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Train a run of six steps with checkpoints of the last two even ones."""
    return train(ranks, record_run(tmp_path_factory.mktemp("recorded") / "run", STEPS))


@pytest.fixture(scope="module")
def routed(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Train a run of a mixture of experts whose routes are replayed."""
    return train(ranks, record_routed_run(tmp_path_factory.mktemp("routed"), STEPS))


def train(ranks: RankServer, paths: RunPaths) -> RunPaths:
    write_recipe(paths, {**TRAINER, **SETTINGS})
    outcome = ranks.run(paths, "replay", trainer=SETTINGS)
    assert outcome.codes == [0], outcome.log
    return paths


def replay(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "areal_hpc", "replay", str(run), *words],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )


def plan(run: RunPaths, first: int, last: int, *overrides: str) -> RecordedStepsReplay:
    return RecordedStepsReplay(
        run, first, last, overrides, RunPaths(run.root.with_name("not-there"))
    )


def lines(root: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in read_readable_records(RunPaths(root).metrics)}


@pytest.mark.parametrize("run", ["recorded", "routed"])
def test_recorded_steps_are_replayed_bit_by_bit(
    request: pytest.FixtureRequest, tmp_path: Path, run: str
) -> None:
    recorded: RunPaths = request.getfixturevalue(run)
    before = list_files(recorded.root)
    ended = replay(recorded.root, "--steps", "6", "--out", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "start    " + str(recorded.checkpoints_dir / "step_00000004") in ended.stdout
    assert "steps 5 to 6: loss and gradient norm equal the recorded ones" in ended.stdout
    assert list_files(recorded.root) == before
    replayed, expected = lines(tmp_path / "out"), lines(recorded.root)
    assert list(replayed) == [5, 6]
    same = [
        name
        for name in expected[5]
        if (metric := find_metric(name)) and metric.source in ("batch", "records", "loss")
    ]
    assert {"loss", "grad_norm", "entropy/mean", "reward/mean", "reply/tokens_p95"} <= {*same}
    assert ("experts/rerouted_fraction" in same) == (run == "routed")
    for step, line in replayed.items():
        assert {name: line[name] for name in same} == {name: expected[step][name] for name in same}
    # The start is a link; trained steps make a checkpoint like any other, with its history.
    state = json.loads((tmp_path / "out/checkpoints/step_00000006/trainer.json").read_text())
    assert state["consumed"] == [1, 2, 3, 4, 5, 6]
    assert state["parent"] == "step_00000004"


@pytest.mark.thorough
def test_other_settings_hold_for_the_asked_steps_alone(recorded: RunPaths, tmp_path: Path) -> None:
    words = ("--steps", "2..3", "--out", str(tmp_path / "out"), "trainer.optimizer.lr=1e-4",
             "trainer.objective.proximal=none",
             "trainer.objective.off_policy_correction=none",
             "trainer.objective.custom=examples.objectives.sapo:compute_terms")  # fmt: skip
    ended = replay(recorded.root, *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lead-in  training steps 1 to 1 with the recorded settings" in ended.stdout
    assert "steps 1 to 1: loss and gradient norm equal the recorded ones" in ended.stdout
    replayed, expected = lines(tmp_path / "out"), lines(recorded.root)
    assert list(replayed) == [1, 2, 3]
    assert replayed[1]["loss"] == expected[1]["loss"]
    assert replayed[1]["lr"] == expected[1]["lr"]
    assert replayed[2]["lr"] == pytest.approx(expected[2]["lr"] / 10)
    assert replayed[2]["importance_weight/mean"] == 1.0
    assert replayed[2]["reward/mean"] == expected[2]["reward/mean"]
    # The same command finds all steps done; another one does not touch it.
    out = RunPaths(tmp_path / "out")
    again = RecordedStepsReplay(recorded, 2, 3, words[4:], out)
    reporter = PlainReporter(out, 3, 0)
    again.replay(reporter, StopEvent())
    assert lines(tmp_path / "out") == replayed
    assert not out.log_dir(3).exists()
    with pytest.raises(RecipeError, match="something else is already at"):
        RecordedStepsReplay(recorded, 2, 3, (), out)


def test_a_replay_on_gpus_that_are_not_there_is_refused_before_its_job_starts(
    recorded: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = RunPaths(tmp_path / "out")
    on_gpu = RecordedStepsReplay(recorded, 2, 3, ("trainer.device=cuda",), out)
    with pytest.raises(RecipeError, match="stage replay: it needs 1 at once") as refusal:
        on_gpu.replay(PlainReporter(out, 3, 0), StopEvent())
    assert "at: trainer.parallel\n" in str(refusal.value)
    assert not out.jobs_dir.exists()


def test_steps_that_were_not_recorded_are_named(recorded: RunPaths) -> None:
    with pytest.raises(RecipeError, match="step 7 is not recorded; the run holds steps 1 to 6"):
        plan(recorded, 5, 9)


def test_missing_and_damaged_shards_are_all_named_before_anything_starts(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", 3)
    write_recipe(run, {**TRAINER, "total_steps": 3})
    first, _, third = sorted(run.shards_dir.iterdir())
    first.unlink()
    with third.open("r+b") as stream:
        stream.seek(-5, os.SEEK_END)
        stream.write(b"x")
    with pytest.raises(ShardError) as caught:
        plan(run, 1, 3)
    assert [problem.key for problem in caught.value.problems] == [str(first), str(third)]
    assert "missing" in caught.value.problems[0].message
    assert "digest" in caught.value.problems[1].message
    with pytest.raises(ShardError):
        plan(run, 2, 2)  # begins with step 1, for want of a checkpoint


def test_settings_that_contradict_the_recording_are_refused(recorded: RunPaths) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(recorded, 5, 6, "trainer.batch_size=6", "trainer.optimizer.lr=1", "seed=2")
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["trainer.batch_size", "seed"]
    with pytest.raises(RecipeError, match="unknown key 'lrr'"):
        plan(recorded, 5, 6, "trainer.optimizer.lrr=1")


ALERTED_STEPS = 4
ALERTED_SETTINGS = {"total_steps": ALERTED_STEPS}
CONSTANT = [0.5] * SAMPLES
RULES = {"off": ["engine_mismatch"]}
"""The recorded engine's log-probabilities are random numbers."""


def write_alerts(paths: RunPaths, **rules: object) -> None:
    write_recipe(paths, {**TRAINER, **ALERTED_SETTINGS})
    with paths.recipe.open("a") as recipe:
        yaml.safe_dump({"alerts": rules}, recipe)


def train_alerted(ranks: RankServer, paths: RunPaths) -> RunPaths:
    write_alerts(paths, **RULES)
    outcome = ranks.run(paths, "replay", trainer=ALERTED_SETTINGS)
    assert outcome.codes == [0], outcome.log
    return paths


@pytest.fixture(scope="module")
def trained(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPaths]:
    """Train a run whose agents always return the same reward, and one whose rewards vary."""
    root = tmp_path_factory.mktemp("runs")
    constant = record_run(root / "constant" / "run", ALERTED_STEPS, rewards=dict.fromkeys(
        range(1, ALERTED_STEPS + 1), CONSTANT))  # fmt: skip
    return {
        "constant": train_alerted(ranks, constant),
        "varied": train_alerted(ranks, record_run(root / "varied" / "run", ALERTED_STEPS)),
    }


def test_a_constant_reward_is_a_failure_after_three_steps(
    trained: dict[str, RunPaths], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(Path(shutil.copytree(trained["constant"].root, tmp_path / "run")))
    rows = read_metrics(paths.metrics)
    assert [row["groups/zero_variance"] for row in rows] == [1.0] * ALERTED_STEPS
    paths.metrics.unlink()
    for row in rows[:3]:
        assert exit_code_of("status", paths.root) == 0
        append_line(paths.metrics, row)
    capfd.readouterr()
    assert exit_code_of("status", paths.root) == 1
    alert = "failure  steps 1 to 3 taught nothing: no reply has an advantage in 100% of groups"
    assert alert in capfd.readouterr().out


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
    reporter = PlainReporter(paths, ALERTED_STEPS, 0)
    shutil.copy(trained["constant"].recipe, paths.recipe)
    for row in read_metrics(trained["constant"].metrics):
        append_line(paths.metrics, row)
        reporter.report_new_steps()
    reporter.close()
    output = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in output] == ["step", "step", "step", "failure", "step"]
