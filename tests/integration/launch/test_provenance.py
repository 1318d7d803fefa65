"""What a launch writes down of the code and the environments that it starts with."""

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.launch.provenance import record_provenance
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import RunPaths
from tests.support.environments import CHECKOUT

AGENT = "class Agent:\n    async def run(self, data, **extra_kwargs):\n        return 1.0\n"


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    told = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's repository with a package and one commit, which is the present folder."""
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
    found: dict[str, Any] = launches[-1]
    return found


def test_it_says_what_programs_and_commands_are_isolated_by(project: Path, tmp_path: Path) -> None:
    words = [f"cluster.fileroot={tmp_path}/runs", "rollout.workflow=myagent.agent.Agent"]
    words += ["rollout.agent.isolation=none"]
    recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", words)
    found = launch(recipe, 1)
    assert found["isolation"] == {"agent": "none", "reward": "bwrap"}


def test_versions_of_every_role_are_those_of_its_own_interpreter(
    recipe: Recipe, project: Path
) -> None:
    found = launch(recipe, 1, train=sys.executable, serve="/no/such/python")
    train = found["environments"]["train"]
    assert train["interpreter"] == sys.executable
    assert {"torch", "megatron-core", "transformers", "areal-hpc"} <= train["packages"].keys()
    assert "cuda" in train
    assert "no such program" in found["environments"]["serve"]["error"]


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
