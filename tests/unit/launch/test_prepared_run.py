"""An earlier run is moved aside by `--fresh`, never deleted; a finished one is not another's."""

import fcntl
import threading
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.launch.evaluation import EvaluationTarget, check_recorded_settings
from areal_hpc.launch.plan import get_base_model_path
from areal_hpc.launch.prepare import (
    archive_run,
    check_finished_recipe,
    check_recipe_changes,
    write_run_recipe,
)
from areal_hpc.launch.run import report_finished_run
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.checkpoints import COMPLETE_MARKER_FILE, TrainerState, write_trainer_state
from areal_hpc.rundir.lock import AllocationNote, write_allocation_note
from areal_hpc.rundir.paths import RunPaths
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for

QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"


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
    kept = archive_run(paths, print)
    assert kept is not None
    assert not paths.root.exists()
    assert (kept / "shards" / "cell-0-000000.h5").read_bytes() == b"precious"
    assert kept.parent == paths.root.parent


def test_a_run_at_work_in_an_allocation_is_not_moved_aside(tmp_path: Path) -> None:
    """The lock says nothing where the file system has none that reach other nodes."""
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
    given = [f"cluster.fileroot={tmp_path}", "trainer.optimizer.decay=cosine"]
    recipe = load_recipe(QUICKSTART, [*given, "trainer.total_steps=100"])
    paths = RunPaths(recipe.run_dir)
    paths.root.mkdir(parents=True)
    write_run_recipe(recipe, paths.recipe)
    checkpoint = paths.checkpoints_dir / "step_00000080"
    checkpoint.mkdir(parents=True)
    write_trainer_state(checkpoint, TrainerState(step=80, seed=1))
    (checkpoint / COMPLETE_MARKER_FILE).touch()

    def resume(*more: str) -> str:
        said: list[str] = []
        check_recipe_changes(load_recipe(QUICKSTART, [*given, *more]), paths, said.append)
        return "\n".join(said)

    grown = "trainer.total_steps=200"
    told = resume(grown)
    assert "at step 81 it is 0.00013 in place of 1.76e-05" in told
    assert "note" not in resume(grown, "trainer.optimizer.decay=constant")


def test_a_finished_directory_is_not_taken_for_a_run_of_another_recipe(tmp_path: Path) -> None:
    """What was trained there with other values must not pass for the result of these."""
    fileroot = f"cluster.fileroot={tmp_path}"
    recipe = load_recipe(QUICKSTART, [fileroot, "trainer.total_steps=5"])
    paths = RunPaths(recipe.run_dir)
    paths.root.mkdir(parents=True)
    write_run_recipe(recipe, paths.recipe)
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


def test_a_run_knows_its_models_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    given = [
        f"cluster.fileroot={tmp_path}", "model={path: base, tiny: null}", "sft=null",
        "trainer.objective.kl={coef: 0.1, reference: frozen}",
    ]  # fmt: skip
    recipe = load_recipe(QUICKSTART, given)
    paths = RunPaths(recipe.run_dir)
    paths.root.mkdir(parents=True)
    write_run_recipe(recipe, paths.recipe)
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
        given = [f"cluster.fileroot={tmp_path}", *(f"{key}={secret}" for key in keys)]
        return load_recipe(QUICKSTART, given)

    first, second = load("sk-1"), load("sk-2")
    paths = RunPaths(first.run_dir)
    paths.root.mkdir(parents=True)
    write_run_recipe(first, paths.recipe)
    said: list[str] = []
    check_recipe_changes(second, paths, said.append)
    assert len(said) == 2
    with pytest.raises(RecipeError, match=r"workflow_kwargs\.token") as refused:
        check_finished_recipe(second, paths)
    assert "sk-" not in "\n".join([*said, str(refused.value)])


def test_arguments_of_another_evaluation_are_not_told(tmp_path: Path) -> None:
    def load(secret: str) -> EvaluationTarget:
        given = [f"cluster.fileroot={tmp_path}", f"evaluation.workflow_kwargs.token={secret}"]
        workflow = "evaluation.workflow=examples.quickstart.agent.ArithmeticAgent"
        return EvaluationTarget(load_recipe(QUICKSTART, [*given, workflow]), tmp_path)

    first, second = load("sk-1"), load("sk-2")
    first.paths.root.mkdir(parents=True)
    write_run_recipe(first.recipe, first.paths.recipe)
    check_recorded_settings(first, first.recipe.evaluation_sets)
    with pytest.raises(RecipeError, match="was played with other arguments") as refused:
        check_recorded_settings(second, second.recipe.evaluation_sets)
    assert "sk-" not in str(refused.value)
