"""Prepared runs: `--fresh` moves a run aside, a finished one has results, keys stay private."""

import fcntl
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.inference.config import InferenceJobConfig
from areal_hpc.jobs.processes.process_setup import StopEvent
from areal_hpc.launch.checks.role_python import MODULES_BY_ROLE
from areal_hpc.launch.evaluation import (
    EvaluationTarget,
    check_recorded_settings,
    find_report_of_step,
    find_target,
    run_evaluation,
)
from areal_hpc.launch.plan import get_base_model_path
from areal_hpc.launch.prepare import (
    archive_run,
    check_finished_recipe,
    check_recipe_changes,
    write_run_recipe,
)
from areal_hpc.launch.run import report_finished_run
from areal_hpc.launch.slurm_launcher import write_scripts
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.keys import read_role_variables
from areal_hpc.recipe.loading import build_recipe, load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rollout.config import RolloutJobConfig
from areal_hpc.rundir.checkpoints import COMPLETE_MARKER_FILE, TrainerState, write_trainer_state
from areal_hpc.rundir.files import secure_run_dir
from areal_hpc.rundir.jobs import LaunchFile
from areal_hpc.rundir.lock import AllocationNote, write_allocation_note
from areal_hpc.rundir.manifests import EvaluationResult, write_evaluation
from areal_hpc.rundir.paths import ROLES, RunPaths
from tests.support.commands import write_program
from tests.support.environments import CHECKOUT
from tests.support.small_run import SIZES, WITHOUT_SETS
from tests.support.waiting import wait_for


def stand_in_pythons(folder: Path) -> tuple[str, ...]:
    """Write a stand-in Python; return overrides that name it, for runs that never start."""
    modules = {name: "" for names in MODULES_BY_ROLE.values() for name in names}
    answer = json.dumps({"version": "3.11.0", "packages": {}, "cuda": None, "modules": modules})
    # Other questions are about the user's code, with which nothing is wrong.
    script = f"case \"$*\" in *find_spec*) echo '{answer}';; *) echo null;; esac"
    write_program(folder / "stand_in_python", script)
    return tuple(f"cluster.{role}.python={folder / 'stand_in_python'}" for role in ROLES)


QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"


def begin_run(recipe: Recipe) -> RunPaths:
    paths = RunPaths(recipe.run_dir)
    paths.root.mkdir(parents=True)
    write_run_recipe(recipe, paths.recipe)
    return paths


def test_an_earlier_run_is_kept_under_another_name_once_it_is_not_in_use(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "quickstart" / "demo")
    assert archive_run(paths, print) is None, "there may be none"
    paths.shards_dir.mkdir(parents=True)
    paths.recipe.touch()
    (paths.shards_dir / "cell-0-000000.h5").write_bytes(b"precious")
    with paths.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ClusterError, match="another process"):
            archive_run(paths, print)
    assert paths.root.exists()
    archived = archive_run(paths, print)
    assert archived is not None
    assert not paths.root.exists()
    assert (archived / "shards" / "cell-0-000000.h5").read_bytes() == b"precious"
    assert archived.parent == paths.root.parent


def test_a_run_at_work_in_an_allocation_is_not_moved_aside(tmp_path: Path) -> None:
    """A file system may have locks that do not reach other nodes."""
    paths = RunPaths(tmp_path / "quickstart" / "demo")
    paths.jobs_dir.mkdir(parents=True)
    paths.recipe.touch()
    is_over = threading.Event()

    def beat() -> None:
        for number in range(10_000):
            write_allocation_note(paths, AllocationNote("12", number))
            if is_over.wait(0.1):
                return

    launcher = threading.Thread(target=beat)
    launcher.start()
    try:
        wait_for(paths.allocation_note.exists)
        with pytest.raises(ClusterError, match="a launcher in allocation 12 is running"):
            archive_run(paths, print)
    finally:
        is_over.set()
        launcher.join()
    assert paths.recipe.exists()


def test_a_resume_with_more_steps_tells_what_they_do_to_the_learning_rate(tmp_path: Path) -> None:
    overrides = [f"cluster.fileroot={tmp_path}", "trainer.optimizer.decay=cosine"]
    paths = begin_run(load_recipe(QUICKSTART, [*overrides, "trainer.total_steps=100"]))
    checkpoint = paths.checkpoints_dir / "step_00000080"
    checkpoint.mkdir(parents=True)
    write_trainer_state(checkpoint, TrainerState(step=80, seed=1))
    (checkpoint / COMPLETE_MARKER_FILE).touch()

    def resume(*more: str) -> str:
        lines: list[str] = []
        check_recipe_changes(load_recipe(QUICKSTART, [*overrides, *more]), paths, lines.append)
        return "\n".join(lines)

    grown = "trainer.total_steps=200"
    text = resume(grown)
    assert "at step 81 it is 0.00013 in place of 1.76e-05" in text
    assert "note" not in resume(grown, "trainer.optimizer.decay=constant")


def test_a_finished_directory_is_not_taken_for_a_run_of_another_recipe(tmp_path: Path) -> None:
    """Weights trained with other values must not pass for the result of these."""
    fileroot = f"cluster.fileroot={tmp_path}"
    recipe = load_recipe(QUICKSTART, [fileroot, "trainer.total_steps=5"])
    paths = begin_run(recipe)
    paths.metrics.write_text('{"step": 5, "reward/mean": 0.5}\n')
    paths.finished_marker.touch()
    check_finished_recipe(recipe, paths)
    fewer = load_recipe(QUICKSTART, [fileroot, "trainer.total_steps=4", "cluster.stop_grace_s=20"])
    check_finished_recipe(fewer, paths)
    other = load_recipe(
        QUICKSTART,
        [fileroot, "trainer.total_steps=5", "trainer.optimizer.lr=10", "trainer.batch_size=64"],
    )
    with pytest.raises(RecipeError) as refused:
        report_finished_run(other, paths)
    keys = [problem.key for problem in refused.value.problems]
    assert keys == ["trainer.batch_size", "trainer.optimizer.lr"]
    assert "is finished, and it was trained with trainer.optimizer.lr=0.0002, got 10.0" in str(
        refused.value
    )


def test_models_are_known_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    overrides = [
        f"cluster.fileroot={tmp_path}", "model={path: base, tiny: null}", "sft=null",
        "trainer.objective.kl={coef: 0.1, reference: frozen}",
    ]  # fmt: skip
    recipe = load_recipe(QUICKSTART, overrides)
    paths = begin_run(recipe)
    written = load_recipe(paths.recipe)
    assert recipe.model.path == Path("base"), "as it was given"
    assert written.trainer.objective.kl.reference == here / "frozen"
    assert written.trainer.objective.teacher.path is None
    monkeypatch.chdir(tmp_path)
    assert get_base_model_path(written, paths) == here / "base"
    monkeypatch.chdir(here)
    check_finished_recipe(recipe, paths)
    monkeypatch.chdir(tmp_path)
    write_run_recipe(written, paths.recipe)
    with pytest.raises(RecipeError, match=r"model\.path cannot change"):
        check_recipe_changes(recipe, paths, pytest.fail)


def test_values_that_may_be_secrets_are_not_told_when_they_change(tmp_path: Path) -> None:
    def load(secret: str) -> Recipe:
        keys = ("cluster.agents.variables.API_KEY", "rollout.workflow_kwargs.token")
        overrides = [f"cluster.fileroot={tmp_path}", *(f"{key}={secret}" for key in keys)]
        return load_recipe(QUICKSTART, overrides)

    first, second = load("sk-1"), load("sk-2")
    paths = begin_run(first)
    lines: list[str] = []
    check_recipe_changes(second, paths, lines.append)
    assert len(lines) == 2
    with pytest.raises(RecipeError, match=r"workflow_kwargs\.token") as refused:
        check_finished_recipe(second, paths)
    assert "sk-" not in "\n".join([*lines, str(refused.value)])


def load_mixture(root: Path, *sources: dict[str, Any]) -> Recipe:
    values = yaml.safe_load(QUICKSTART.read_text()) | {
        "train_dataset": {"sources": [*sources]},
        "cluster": {"fileroot": str(root)},
    }
    return build_recipe(values)


def test_sources_are_compared_key_by_key_and_their_secrets_are_not_told(tmp_path: Path) -> None:
    def make_source(**keys: Any) -> dict[str, Any]:
        return {"path": "a", "workflow": "b.C", **keys}

    first = load_mixture(tmp_path, make_source(workflow_kwargs={"token": "sk-1"}), {"path": "b"})
    paths = begin_run(first)
    more = load_mixture(tmp_path, *first.model_dump()["train_dataset"]["sources"], {"path": "c"})
    other = load_mixture(tmp_path, make_source(workflow_kwargs={"token": "sk-2"}), {"path": "b"})
    for recipe, key in ((more, "2.path"), (other, "0.workflow_kwargs.token")):
        with pytest.raises(RecipeError) as refused:
            check_recipe_changes(recipe, paths, pytest.fail)
        assert f"train_dataset.sources.{key} cannot change" in str(refused.value)
        with pytest.raises(RecipeError, match=f"trained with train_dataset.sources.{key}") as end:
            check_finished_recipe(recipe, paths)
        assert "sk-" not in f"{refused.value}{end.value}"


def test_arguments_of_another_evaluation_are_not_told(tmp_path: Path) -> None:
    def load(secret: str) -> EvaluationTarget:
        overrides = [f"cluster.fileroot={tmp_path}", f"evaluation.workflow_kwargs.token={secret}"]
        workflow = "evaluation.workflow=examples.quickstart.agent.ArithmeticAgent"
        return EvaluationTarget(load_recipe(QUICKSTART, [*overrides, workflow]), tmp_path)

    first, second = load("sk-1"), load("sk-2")
    begin_run(first.recipe)
    check_recorded_settings(first, first.recipe.evaluation_sets)
    with pytest.raises(RecipeError, match="was played with other arguments") as refused:
        check_recorded_settings(second, second.recipe.evaluation_sets)
    assert "sk-" not in str(refused.value)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    overrides = [f"cluster.fileroot={tmp_path}/runs", "evaluation.sets=null"]
    return begin_run(load_recipe(QUICKSTART, overrides))


def evaluate(paths: RunPaths, step: int, reward: float) -> None:
    paths.data_dir.mkdir(parents=True, exist_ok=True)
    paths.evaluation_tasks("valid").write_text('{"n": 0}\n')
    paths.evaluation(step, "valid").parent.mkdir(exist_ok=True)
    write_evaluation(paths, "valid", EvaluationResult(step, 1, reward, [reward], {}, 1))


def find_reward(target: EvaluationTarget, step: int) -> float:
    report = find_report_of_step(target, step, target.recipe.evaluation_sets)
    return report.sets["valid"].metrics["avg@1"].value


def test_a_step_whose_checkpoint_is_gone_is_compared_by_what_training_found(run: RunPaths) -> None:
    evaluate(run, 10, 0.25)
    target = find_target(run.root, step=0, recipe=None)
    assert find_reward(target, 10) == 0.25
    with pytest.raises(RecipeError, match="no checkpoint"):
        find_reward(target, 11)


def test_results_of_another_step_lie_where_those_of_this_do(run: RunPaths, tmp_path: Path) -> None:
    """A run that its reader may not write to is evaluated elsewhere."""
    elsewhere = [f"cluster.fileroot={tmp_path}/elsewhere"]
    start = find_target(run.root, step=0, recipe=None, overrides=elsewhere)
    with pytest.raises(RecipeError, match="step 0 were not evaluated"):
        find_reward(start, 0)
    evaluate(start.paths, 0, 0.5)
    again = find_target(run.root, step=0, recipe=None, overrides=[*elsewhere, "trial_name=again"])
    assert find_reward(again, 0) == 0.5


def test_an_evaluation_on_other_tasks_than_the_compared_one_is_not_started(
    run: RunPaths, tmp_path: Path
) -> None:
    evaluate(run, 10, 0.25)
    start = find_target(run.root, step=0, recipe=None)
    before = find_report_of_step(start, 10, start.recipe.evaluation_sets)
    make_tiny_model(tmp_path / "model", ["1 + 1 = 2"], hidden=32, heads=2, kv_heads=2, head_dim=16)
    overrides = [f"cluster.fileroot={tmp_path}/others", *WITHOUT_SETS, *SIZES]
    overrides += stand_in_pythons(tmp_path)
    target = find_target(tmp_path / "model", step=None, recipe=QUICKSTART, overrides=overrides)
    with pytest.raises(RecipeError, match="step 10 was evaluated on other tasks of valid: 1, this"):
        run_evaluation(target, target.recipe.evaluation_sets, StopEvent(), before)
    assert not target.paths.root.exists()


SECRET = "SECRET456"
OTHERS_MAY_NOTHING, GROUP_MAY_READ = 0o077, 0o027


def write_run(fileroot: Path, readable_by: str, *more: str) -> RunPaths:
    """Prepare a run without submitting it, under a umask that forbids nothing."""
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
        write_scripts(recipe, print_line=print)
        assert os.umask(0) == 0, "the caller's own is what it was"
    finally:
        os.umask(before)
    return RunPaths(recipe.run_dir)


@pytest.mark.parametrize(
    ("readable_by", "forbidden"), [("owner", OTHERS_MAY_NOTHING), ("group", GROUP_MAY_READ)]
)
def test_no_file_allows_more_than_asked(tmp_path: Path, readable_by: str, forbidden: int) -> None:
    paths = write_run(tmp_path, readable_by)
    files = [path for path in (paths.root, *paths.root.rglob("*")) if not path.is_symlink()]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in files}
    assert paths.job("trainer").script in modes
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode & forbidden}
    assert modes[paths.root] == 0o777 & ~forbidden
    secret = [path for path in files if path.is_file() and SECRET in path.read_text("latin-1")]
    assert secret
    assert {modes[path] for path in (*secret, paths.admin_key, paths.service_key)} == {0o600}


def test_batches_larger_than_their_data_sets_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("train_dataset.kwargs.size=8", "trainer.batch_size=8", "sft.dataset.kwargs.size=9")
    write_run(tmp_path, "owner", *sizes, "sft.batch_size=10")
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "batch_size" in line]
    assert "sft.batch_size=10 is more than the 9 rows of sft.dataset" in note
    larger = (*sizes, "trainer.batch_size=16", "sft.batch_size=8")
    write_run(tmp_path, "owner", *larger, "trial_name=second")
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "batch_size" in line]
    assert "trainer.batch_size=16 is more than the 8 rows of train_dataset" in note


def test_a_secret_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (f"cluster.agents.variables.KEY={SECRET}", f"rollout.workflow_kwargs.token={SECRET}")
    monkeypatch.setattr(sys, "argv", ["areal-hpc", "submit", *options, "seed=1"])
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
    configs = {process.name: process.config for process in launch.job.processes}
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
