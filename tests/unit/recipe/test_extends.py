"""A recipe that extends another: its own keys win, and what cannot be extended is told."""

from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.shipped import find_shipped_recipe


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the quick start, in a folder beside the one of those that extend it."""
    path = tmp_path / "bases" / "base.yaml"
    path.parent.mkdir()
    path.write_text(find_shipped_recipe("quickstart").read_text())
    (tmp_path / "own").mkdir()
    return path


def write(folder: Path, text: str, name: str = "own.yaml") -> Path:
    path = folder / "own" / name
    path.write_text(text)
    return path


def test_own_keys_win_over_those_of_the_base(base: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "extends: ../bases/base.yaml\n"
        "trial_name: own\n"
        "model: {path: /models/mine}\n"
        "sft: null\n"
        "evaluation: {sets: {longer: null, sampled: {metrics: [cons@k]}}}\n"
        "trainer: {optimizer: {lr: 1.0}}\n",
    )
    before, recipe = load_recipe(base), load_recipe(path)
    assert recipe.trial_name == "own"
    assert recipe.experiment_name == before.experiment_name
    assert recipe.model.path == Path("/models/mine")
    assert recipe.model.tiny is None, "of the model's sources one counts"
    assert recipe.sft is None
    assert list(recipe.evaluation.sets) == ["sampled"]
    assert recipe.evaluation.sets["sampled"].metrics == ("cons@k",), "a list is replaced"
    assert recipe.trainer.optimizer.lr == 1.0
    assert recipe.trainer.optimizer.weight_decay == before.trainer.optimizer.weight_decay


def test_overrides_win_over_all_files_and_a_site_file_over_none(base: Path, tmp_path: Path) -> None:
    path = write(tmp_path, "extends: ../bases/base.yaml\nseed: 2\ncluster: {fileroot: own}\n")
    site = tmp_path / "site.yaml"
    site.write_text("fileroot: site\nreadable_by: group\n")
    recipe = load_recipe(path, ["seed=3"], site)
    assert (recipe.seed, str(recipe.cluster.fileroot)) == (3, "own")
    assert recipe.cluster.readable_by == "group"


def test_a_chain_of_files_ends_in_one_recipe_without_the_key(base: Path, tmp_path: Path) -> None:
    write(tmp_path, "extends: ../bases/base.yaml\nseed: 2\ntrial_name: middle\n", "middle.yaml")
    recipe = load_recipe(write(tmp_path, "extends: middle.yaml\ntrial_name: own\n"))
    assert (recipe.seed, recipe.trial_name) == (2, "own")
    assert "extends" not in recipe.model_dump()


def test_a_shipped_recipe_is_extended_and_loaded_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("extends: variants/ppo\ntrial_name: own\n")
    assert load_recipe(path).trainer.objective.preset == "ppo"
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart").trial_name == "demo"
    with pytest.raises(RecipeError, match=r"there is no recipe at quickstrt\n  try: did you mean"):
        load_recipe("quickstrt")


@pytest.mark.parametrize(
    ("named", "said", "hint"),
    [
        ("missing.yaml", "there is no recipe at", "ls "),
        ("../bases/bose.yaml", "there is no recipe at", "did you mean"),
        ("quickstart_slum", "no shipped recipe 'quickstart_slum'", "did you mean quickstart_slurm"),
        ("nothing_like_it", "no shipped recipe 'nothing_like_it'", "areal-hpc recipes"),
        ("[a.yaml, b.yaml]", "expected a path or a name, got ['a.yaml', 'b.yaml']", "leave it out"),
        ("own.yaml", "a recipe extends itself", "leave `extends` out"),
        ("other.yaml", "a recipe extends itself", "leave `extends` out"),
    ],
)
@pytest.mark.usefixtures("base")
def test_what_cannot_be_extended_is_told(named: str, said: str, hint: str, tmp_path: Path) -> None:
    write(tmp_path, "extends: own.yaml\n", "other.yaml")
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, f"extends: {named}\n"))
    (problem,) = caught.value.problems
    assert said in problem.message
    assert problem.key.endswith(".yaml: extends")
    assert hint in problem.hint
