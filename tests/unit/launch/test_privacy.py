"""Nobody but its owner writes in a run directory, and keys are the owner's alone."""

import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from areal_hpc.inference.config import InferenceJobConfig
from areal_hpc.launch.slurm_launcher import write_scripts
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.private_values import read_role_variables
from areal_hpc.rollout.config import RolloutJobConfig
from areal_hpc.rundir.files import secure_run_dir
from areal_hpc.rundir.jobs import LaunchFile
from areal_hpc.rundir.paths import ROLES, RunPaths
from tests.support.environments import CHECKOUT
from tests.support.small_run import SIZES
from tests.support.stand_in_pythons import stand_in_pythons

SECRET = "SECRET456"
OTHERS_MAY_NOTHING, GROUP_MAY_READ = 0o077, 0o027


def write_run(fileroot: Path, readable_by: str, *more: str) -> RunPaths:
    """A run that is put in place and not submitted, by somebody whose umask forbids nothing."""
    overrides = (
        f"cluster.fileroot={fileroot}",
        f"cluster.readable_by={readable_by}",
        *(f"cluster.{role}.variables={{WANDB_API_KEY: {SECRET}-{role}}}" for role in ROLES),
        "rollout.workflow=tests.support.broken_agents.TakesToken",
        f"rollout.workflow_kwargs={{token: {SECRET}-token}}",
        *stand_in_pythons(fileroot),
        *more,
    )
    recipe = load_recipe(CHECKOUT / "recipes/quickstart_slurm.yaml", [*SIZES, *overrides])
    before = os.umask(0)
    try:
        write_scripts(recipe, print_line=lambda line: None)
        assert os.umask(0) == 0, "the caller's own is what it was"
    finally:
        os.umask(before)
    return RunPaths(recipe.run_dir)


@pytest.mark.parametrize(
    ("readable_by", "forbidden"), [("owner", OTHERS_MAY_NOTHING), ("group", GROUP_MAY_READ)]
)
def test_no_file_of_a_run_allows_more_than_was_asked(
    tmp_path: Path, readable_by: str, forbidden: int
) -> None:
    paths = write_run(tmp_path, readable_by)
    files = [path for path in (paths.root, *paths.root.rglob("*")) if not path.is_symlink()]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in files}
    assert paths.job("trainer").script in modes
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode & forbidden}
    assert modes[paths.root] == 0o777 & ~forbidden
    secret = [path for path in files if path.is_file() and SECRET in path.read_text("latin-1")]
    assert secret
    assert {modes[path] for path in (*secret, paths.admin_key, paths.service_key)} == {0o600}


def test_a_secret_is_written_once_and_reaches_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (f"cluster.agents.variables.KEY={SECRET}", f"rollout.workflow_kwargs.token={SECRET}")
    monkeypatch.setattr(sys, "argv", ["areal-hpc", "submit", *given, "seed=1"])
    paths = write_run(tmp_path, "group")
    write_run(tmp_path, "group", "trainer.total_steps=7")
    files = [path for path in paths.root.rglob("*") if path.is_file() and not path.is_symlink()]
    texts = {path: path.read_text("latin-1") for path in files}
    for what in (*ROLES, "token"):
        secret = f"{SECRET}-{what}"
        assert {path: text.count(secret) for path, text in texts.items() if secret in text} == {
            paths.recipe: 1
        }
    assert [path.name for path in files if path.name.startswith("recipe.before")]
    assert "seed=1" in texts[paths.provenance]
    assert SECRET not in texts[paths.provenance]
    launch = msgspec.json.decode(paths.job("cell-0").launch.read_bytes(), type=LaunchFile)
    assert read_role_variables(Path(launch.recipe), "train") == {"WANDB_API_KEY": f"{SECRET}-train"}
    configs = {one.name: one.config for one in launch.job.processes}
    driver = RolloutJobConfig.model_validate(configs["driver"])
    assert driver.recipe.rollout.workflow_kwargs == {"token": f"{SECRET}-token"}
    server = InferenceJobConfig.model_validate(configs["inference"])
    assert server.recipe.cluster.serve.variables == {"WANDB_API_KEY": f"{SECRET}-serve"}


def test_an_open_directory_of_an_earlier_run_is_closed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o2777)
    secure_run_dir(run, "group")
    assert stat.S_IMODE(run.stat().st_mode) == 0o2750
    secure_run_dir(run, "owner")
    assert stat.S_IMODE(run.stat().st_mode) & 0o777 == 0o700
