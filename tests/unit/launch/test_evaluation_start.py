"""What an evaluation is compared with: results of a step, from training or of its own."""

from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.evaluation import EvaluationTarget, find_report_of_step, find_target
from areal_hpc.launch.prepare import write_run_recipe
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.manifests import EvaluationResult, write_evaluation
from areal_hpc.rundir.paths import RunPaths
from tests.support.environments import CHECKOUT


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    recipe = load_recipe(
        CHECKOUT / "recipes" / "quickstart.yaml",
        [f"cluster.fileroot={tmp_path}/runs", "evaluation.sets=null"],
    )
    paths = RunPaths(recipe.run_dir)
    paths.root.mkdir(parents=True)
    write_run_recipe(recipe, paths.recipe)
    return paths


def evaluate(paths: RunPaths, step: int, reward: float) -> None:
    paths.data_dir.mkdir(parents=True, exist_ok=True)
    paths.evaluation_tasks("valid").write_text('{"n": 0}\n')
    paths.evaluation(step, "valid").parent.mkdir(exist_ok=True)
    write_evaluation(paths, "valid", EvaluationResult(step, 1, reward, [reward], {}, 1))


def find_reward(target: EvaluationTarget, step: int) -> float:
    found = find_report_of_step(target, step, target.recipe.evaluation_sets)
    return found.sets["valid"].metrics["avg@1"].value


def test_a_step_whose_checkpoint_is_gone_is_compared_by_what_training_found(run: RunPaths) -> None:
    evaluate(run, 10, 0.25)
    target = find_target(run.root, step=0, recipe=None)
    assert find_reward(target, 10) == 0.25
    with pytest.raises(RecipeError, match="no checkpoint"):
        find_reward(target, 11)


def test_results_of_another_step_are_found_where_those_of_this_one_go(
    run: RunPaths, tmp_path: Path
) -> None:
    """A run that its reader may not write to is evaluated elsewhere."""
    elsewhere = [f"cluster.fileroot={tmp_path}/elsewhere"]
    start = find_target(run.root, step=0, recipe=None, overrides=elsewhere)
    with pytest.raises(RecipeError, match="step 0 were not evaluated"):
        find_reward(start, 0)
    evaluate(start.paths, 0, 0.5)
    again = find_target(run.root, step=0, recipe=None, overrides=[*elsewhere, "trial_name=again"])
    assert find_reward(again, 0) == 0.5
