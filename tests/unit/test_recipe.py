"""A recipe is read whole or refused with every problem it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.loading import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
QUICKSTART = RECIPES / "quickstart.yaml"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_recipe_parses(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.run_dir == recipe.cluster.fileroot / recipe.experiment_name / recipe.trial_name


def test_overrides_reach_any_depth_and_keep_their_types() -> None:
    recipe = load_recipe(
        QUICKSTART, ["trainer.optimizer.lr=1e-3", "rollout.max_head_offpolicyness=2"]
    )
    assert recipe.trainer.optimizer.lr == 1e-3
    assert recipe.rollout.max_head_offpolicyness == 2


def test_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, ["trainer.totl_steps=3"])
    assert "unknown key 'totl_steps'" in str(caught.value)
    assert "at: trainer.totl_steps" in str(caught.value)
    assert "did you mean total_steps?" in str(caught.value)
    assert caught.value.exit_code == 78


def test_unknown_key_inside_an_optional_section_is_explained() -> None:
    with pytest.raises(RecipeError, match="did you mean batch_size"):
        load_recipe(QUICKSTART, ["sft.batch_sise=3"])


def test_wrong_type_says_expected_and_got() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, ["trainer.total_steps=many"])
    assert "valid integer" in str(caught.value)
    assert "'many'" in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(
            QUICKSTART, ["trainer.total_steps=0", "rollout.nonsense=1", "inference.cells=none"]
        )
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"trainer.total_steps", "rollout.nonsense", "inference.cells"}


def test_values_that_do_not_fit_together_are_all_reported() -> None:
    parallel = ["trainer.parallel.dp=3", "trainer.parallel.ep=2"]
    overrides = ["trainer.minibatches=5", "rollout.n_samples=1", *parallel]
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, overrides)
    message = str(caught.value)
    assert "trainer.batch_size=32 is not divisible by trainer.minibatches=5" in message
    assert "dp=3" in message
    assert "over ep=2: each pipeline stage has tp x cp x dp = 3 ranks" in message
    assert "n_samples=1" in message


def test_an_agent_is_named_unless_programs_come() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, ["rollout.workflow=''"])
    assert [problem.key for problem in caught.value.problems] == ["rollout.workflow"]
    online = "rollout.agent.mode=online"
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, [online])
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["rollout.workflow", "valid_dataset"]
    recipe = load_recipe(QUICKSTART, [online, "rollout.workflow=''", "valid_dataset=null"])
    assert recipe.rollout.workflow == ""


@pytest.mark.parametrize("mode", ["inline", "online"])
def test_an_evaluation_job_needs_tasks_to_play(mode: str) -> None:
    overrides = ["valid_dataset=null", "evaluation.separate_cell=true"]
    overrides += ["rollout.agent.mode=online", "rollout.workflow=''"] if mode == "online" else []
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, overrides)
    assert [problem.key for problem in caught.value.problems] == ["evaluation.separate_cell"]
    assert "needs a valid_dataset" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [1", "is not YAML"),
        ("- 1\n- 2\n", "holds a list"),
        ("x: ${nowhere}\n", "cannot be read"),
    ],
)
def test_files_that_are_no_recipe_are_refused(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with pytest.raises(RecipeError, match=expected):
        load_recipe(path)


def test_missing_recipe_is_named() -> None:
    with pytest.raises(RecipeError, match="there is no recipe at"):
        load_recipe(Path("no/such.yaml"))


def test_override_without_a_value_is_refused() -> None:
    with pytest.raises(RecipeError, match="expected key=value, got 'trainer'"):
        load_recipe(QUICKSTART, ["trainer"])


def test_the_resolved_recipe_parses_to_itself(tmp_path: Path) -> None:
    recipe = load_recipe(QUICKSTART)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(path) == recipe


def test_engine_and_trainer_must_hold_the_same_bits() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, ["inference.dtype=bfloat16", "trainer.device=cuda"])
    assert {problem.key for problem in caught.value.problems} == {
        "inference.dtype",
        "inference.device",
    }


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", ""])
def test_names_that_would_leave_the_file_root_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="trial_name"):
        load_recipe(QUICKSTART, [f"trial_name='{name}'"])


def test_sessions_must_outlive_their_episodes() -> None:
    with pytest.raises(RecipeError, match="session_timeout_s=3600 is shorter than 3 attempts"):
        load_recipe(QUICKSTART, ["rollout.episode_timeout_s=2400"])


def test_a_partial_group_is_no_larger_than_the_whole() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.min_samples"):
        load_recipe(QUICKSTART, ["rollout.min_samples=100"])


def test_extra_episodes_take_part_of_the_concurrency() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.max_concurrent_rollouts"):
        load_recipe(QUICKSTART, ["rollout.extra_samples=10000"])


def test_a_curriculum_and_weights_of_sources_do_not_mix() -> None:
    overrides = [
        "train_dataset.generator=null",
        "train_dataset.kwargs={}",
        "train_dataset.sources=[{path: a.jsonl, weight: 3}, {path: b.jsonl}]",
    ]
    assert load_recipe(QUICKSTART, overrides).train_dataset.sources[0].weight == 3
    with pytest.raises(RecipeError, match=r"are ignored when rollout[.]curriculum is set"):
        load_recipe(QUICKSTART, [*overrides, "rollout.curriculum=my.tasks:weigh"])


def test_groups_of_replicas_are_for_broadcasts() -> None:
    with pytest.raises(RecipeError, match="from disk every replica loads by itself"):
        load_recipe(QUICKSTART, ["weights.transport=disk", "weights.replicas_per_group=2"])
