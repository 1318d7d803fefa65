"""`areal-hpc status` reports a run at every moment, and a launch records its environment."""

import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from areal_hpc.launch.provenance import record_provenance
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.checkpoints import UntrainedBatchPart
from areal_hpc.rundir.jobs import JobSpec, LaunchFile, TaskExit
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.manifests import record_quarantine
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import exit_code_of
from tests.support.environments import CHECKOUT
from tests.support.run_files import list_files

STEP = {
    "step": 1,
    "reward/mean": 0.5,
    "time/step_s": 2.0,
    "throughput/wall_tokens_per_s": 100.0,
    "tokens/trained": 200,
    "tokens/sampled": 100,
    "episodes": 4,
    "staleness/mean": 0.0,
    "staleness/max": 0,
    "staleness/mixed_version_rows": 0,
    "logprob/engine_trainer_max_abs_diff": 1e-6,
    "logprob/compared_tokens": 10,
}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Make a run directory in its state before the first job starts."""
    recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", [f"cluster.fileroot={tmp_path}"])
    paths = RunPaths(recipe.run_dir)
    paths.log_dir(1).mkdir(parents=True)
    (paths.jobs_dir / "trainer").mkdir(parents=True)
    (paths.jobs_dir / "trainer" / "launch.json").write_text("{}")
    paths.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    paths.lock.touch()
    return paths


@pytest.fixture
def status(paths: RunPaths, capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return the output of `areal-hpc status`, which must succeed and leave the run unchanged."""

    def ask() -> str:
        before = list_files(paths.root)
        assert exit_code_of("status", paths.root) == 0
        output = capfd.readouterr()
        assert output.err == ""
        assert list_files(paths.root) == before
        return output.out

    return ask


def test_a_run_without_steps_has_a_state(paths: RunPaths, status: Callable[[], str]) -> None:
    descriptor = os.open(paths.lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "quickstart/demo: running here\n  step              0 of 25" in status()
    os.close(descriptor)
    assert "quickstart/demo: stopped\n" in status()
    append_line(paths.sft_metrics, {"step": 40, "loss": 1.0})
    assert "SFT               step 40" in status()
    crash = TaskExit(70, "trainer", reason="ValueError: no")
    (paths.jobs_dir / "trainer" / "task_exit.0.json").write_bytes(msgspec.json.encode(crash))
    assert "quickstart/demo: failed\n" in status()


@pytest.mark.parametrize("held_out", [None, 0.25], ids=["without", "with"])
def test_a_run_that_trained_is_summarized_with_or_without_held_out_tasks(
    paths: RunPaths, status: Callable[[], str], held_out: float | None
) -> None:
    if held_out is not None:
        append_line(paths.metrics, {"step": 0, "eval/reward": held_out})
        assert "step              0 of 25" in status()
    append_line(paths.metrics, STEP)
    text = status()
    assert "quickstart/demo: stopped\n  step              1 of 25" in text
    assert "training reward   0.500 -> 0.500" in text
    assert ("held-out reward   0.250" in text) == (held_out is not None)
    assert "export" not in text, "no model has been exported"
    paths.export_dir("step_00000001").mkdir(parents=True)
    assert "trained model" in status()
    odd = ("reward/mean", "staleness/mean", "staleness/max", "throughput/wall_tokens_per_s")
    append_line(paths.metrics, STEP | dict.fromkeys(odd) | {"step": 2})
    assert "training reward   0.500 -> not finite" in status()


def test_idle_time_and_batches_set_aside_are_named(
    paths: RunPaths, status: Callable[[], str], capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("trainer", "cell-0"):
        job = paths.job(name)
        job.root.mkdir(exist_ok=True)
        launch = LaunchFile(JobSpec(name, "agents", []), "", "", "", {})
        job.launch.write_bytes(msgspec.json.encode(launch))
    waits = {"time/step_s": 3600.0, "time/batch_wait_s": 1800.0, "cells/idle_s": 900.0}
    append_line(paths.metrics, STEP | waits)
    append_line(paths.events, {"time": time.time(), "event": "no_cell", "waited_s": 240.0})
    for step in (7, 9):
        record_quarantine(paths, UntrainedBatchPart(step, "damaged", quarantine="damaged"))
    text = status()
    assert "idle              trainer waiting for cells 0.50 of 1.00 node-hours\n" in text
    assert "idle              cells waiting for the trainer 0.25 of 1.00 node-hours\n" in text
    assert "idle              no cell has been there for 4 min\n" in text
    named = f"batches 7, 9; areal-hpc audit {paths.root} says why\n"
    assert f"quarantined       {named}" in text
    assert exit_code_of("why", paths.root) == 1
    assert f"quarantined: {named}" in capfd.readouterr().out


AGENT = "class Agent:\n    async def run(self, data, **extra_kwargs):\n        return 1.0\n"


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    ended = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return ended.stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a user's repository with a package and one commit, and enter its folder."""
    project = tmp_path / "project"
    (project / "myagent").mkdir(parents=True)
    (project / "myagent" / "__init__.py").touch()
    (project / "myagent" / "agent.py").write_text(AGENT)
    (project / "myagent" / "prompt.txt").write_text("Think.")
    git(project, "init", "--quiet")
    git(project, "add", "myagent/agent.py", "myagent/__init__.py")
    git(project, "commit", "--quiet", "-m", "first")
    monkeypatch.chdir(project)
    return project


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    overrides = [f"cluster.fileroot={tmp_path}/runs", "rollout.workflow=myagent.agent.Agent"]
    return load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", overrides)


def launch(recipe: Recipe, attempt: int, **pythons: str) -> dict[str, Any]:
    paths = RunPaths(recipe.run_dir)
    record_provenance(recipe, paths, attempt, pythons)
    launches = json.loads(paths.provenance.read_text())["launches"]
    assert len(launches) == attempt
    record: dict[str, Any] = launches[-1]
    return record


def test_it_says_what_programs_and_commands_are_isolated_by(project: Path, tmp_path: Path) -> None:
    words = [f"cluster.fileroot={tmp_path}/runs", "rollout.workflow=myagent.agent.Agent"]
    words += ["rollout.agent.isolation=none"]
    recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", words)
    record = launch(recipe, 1)
    assert record["isolation"] == {"agent": "none", "reward": "bwrap"}


def test_versions_of_every_role_are_those_of_its_own_interpreter(
    recipe: Recipe, project: Path
) -> None:
    record = launch(recipe, 1, train=sys.executable, serve="/no/such/python")
    train = record["environments"]["train"]
    assert train["interpreter"] == sys.executable
    assert {"torch", "megatron-core", "transformers", "areal-hpc"} <= train["packages"].keys()
    assert "cuda" in train
    assert "no such program" in record["environments"]["serve"]["error"]


def test_what_differs_from_the_commit_is_a_patch_for_the_owner_alone(
    recipe: Recipe, project: Path
) -> None:
    agent = project / "myagent" / "agent.py"
    agent.write_text(AGENT.replace("1.0", "2.0"))
    state = launch(recipe, 1)["repositories"]["user"]
    assert state["revision"] == git(project, "rev-parse", "HEAD")
    assert "myagent/prompt.txt" in state["untracked"]
    patch = recipe.run_dir / state["patch"]
    assert stat.S_IMODE(patch.stat().st_mode) == 0o600
    git(project, "checkout", "--quiet", "--", "myagent/agent.py")
    git(project, "apply", str(patch))
    assert "2.0" in agent.read_text()
    git(project, "checkout", "--quiet", "--", "myagent/agent.py")
    assert launch(recipe, 2)["repositories"]["user"]["patch"] is None
