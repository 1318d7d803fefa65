"""Evaluation sets of a recipe, with what they inherit."""

from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.evaluation import EvaluationSet, resolve_keep_best
from tests.support.environments import CHECKOUT
from tests.support.small_run import WITHOUT_SETS

QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"


def load_sets(*overrides: str) -> dict[str, EvaluationSet]:
    recipe = load_recipe(QUICKSTART, [*WITHOUT_SETS, *overrides])
    return {one.name: one for one in recipe.evaluation_sets}


def test_the_quick_start_has_three_sets_and_null_takes_them_out() -> None:
    recipe = load_recipe(QUICKSTART)
    assert [one.name for one in recipe.evaluation_sets] == ["valid", "longer", "sampled"]
    one = load_recipe(QUICKSTART, ["evaluation.sets.longer=null"])
    assert [*one.evaluation.sets] == ["sampled"]
    assert load_recipe(QUICKSTART, ["evaluation.sets=null"]).evaluation.sets == {}


def test_valid_dataset_is_the_set_named_valid_with_the_keys_of_evaluation() -> None:
    (valid,) = load_sets("evaluation.tasks=7", "evaluation.every_steps=3").values()
    assert (valid.name, valid.number, valid.dataset_key) == ("valid", 0, "valid_dataset")
    assert (valid.tasks, valid.every_steps, valid.n_samples) == (7, 3, 1)
    assert valid.sampling_key == "evaluation.sampling"


def test_a_set_overrides_what_it_names_and_inherits_the_rest() -> None:
    sets = load_sets(
        "evaluation.workflow=package.module:Other",
        "evaluation.workflow_kwargs={depth: 2}",
        "evaluation.sets={zebra: {dataset: {path: z.jsonl}, every_steps: 0}, aime: {dataset: "
        "{path: a.jsonl}, n_samples: 8, sampling: {temperature: 0.6}, workflow: 'a.b:C'}}",
    )
    assert {name: one.number for name, one in sets.items()} == {"valid": 0, "aime": 1, "zebra": 2}
    aime, zebra = sets["aime"], sets["zebra"]
    assert (aime.workflow, aime.workflow_kwargs) == ("a.b:C", {})
    assert (aime.sampling.temperature, aime.n_samples) == (0.6, 8)
    assert (aime.agent_section_key, aime.sampling_key) == (
        "evaluation.sets.aime",
        "evaluation.sets.aime.sampling",
    )
    assert (zebra.workflow, zebra.workflow_kwargs) == ("package.module:Other", {"depth": 2})
    assert (zebra.every_steps, zebra.agent_section_key) == (0, "evaluation")


def test_numbers_do_not_depend_on_the_order_in_which_sets_are_written() -> None:
    one, other = ("{dataset: {path: a}}", "{dataset: {path: b}}")
    first = load_sets(f"evaluation.sets={{b: {other}, a: {one}}}")
    second = load_sets(f"evaluation.sets={{a: {one}, b: {other}}}", "valid_dataset=null")
    assert first["a"].number == second["a"].number == 1
    assert first["b"].number == second["b"].number == 2


def test_the_best_checkpoint_is_chosen_by_a_metric_with_a_number_in_place_of_k() -> None:
    sets = "evaluation.sets={aime: {dataset: {path: a}, n_samples: 8, metrics: [pass@k, pass@2]}}"
    for named, meant in (
        ("", ""),
        ("aime/pass@k", "aime/pass@8"),
        ("aime/pass@2", "aime/pass@2"),
        ("valid/avg@k", "valid/avg@1"),
    ):
        recipe = load_recipe(QUICKSTART, [*WITHOUT_SETS, sets, f"evaluation.keep_best='{named}'"])
        assert resolve_keep_best(recipe.evaluation, recipe.evaluation_sets) == meant
