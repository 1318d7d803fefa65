"""Shipped recipes, recipes that extend them, and presets: precedence of keys, and messages."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_hpc.cli.main import main
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.cross_checks import find_likely_mistakes
from areal_hpc.recipe.files import find_shipped_recipe, list_shipped_recipes
from areal_hpc.recipe.loading import build_recipe, load_recipe, merge_overrides
from areal_hpc.recipe.presets import PRESETS, apply_preset, describe_preset
from areal_hpc.recipe.project_files import read_project_files
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.source_objectives import resolve_source_objectives
from tests.support.commands import exit_code_of
from tests.support.environments import CHECKOUT

RECIPES = list_shipped_recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_planned_by_its_name(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout's folders are not looked at
    assert exit_code_of("plan", name) == 0
    shown = capsys.readouterr().out
    assert "\n  job " in shown
    assert "qwen" in name or "memory of one GPU" not in shown


def test_the_list_has_every_recipe_quick_start_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("recipes") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", head) == ["name", "hardware", "wall time", "purpose"]
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert lines[0].startswith("quickstart  ")
    assert max(map(len, lines)) < 170


@pytest.mark.parametrize("name", RECIPES)
def test_a_project_like_it_is_the_same_recipe_with_its_own_code(name: str, tmp_path: Path) -> None:
    project = read_project_files(name)
    for path, content in project.contents.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    text = load_recipe(tmp_path / project.recipe).model_dump_json()
    assert text == load_recipe(name).model_dump_json().replace("examples.", "")
    for module in re.findall(r'"([a-z_]+(?:\.[a-z_]+)+)[:.]\w+"', text):
        inside = (tmp_path / module.replace(".", "/")).with_suffix(".py")
        assert module.startswith("areal_hpc.") or inside.is_file(), module
    code = b"\n".join(project.contents.values())
    assert b"examples." not in code
    assert b"recipes/" not in code


def test_init_writes_what_can_be_run_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my project"
    assert exit_code_of("init", folder) == 0
    output = capsys.readouterr().out
    assert f"wrote    {folder / 'my_recipe.yaml'}\n" in output
    assert f"next     cd '{folder}'\n" in output
    assert output.endswith("areal-hpc run my_recipe.yaml\n")
    monkeypatch.chdir(folder)
    assert exit_code_of("plan", "my_recipe.yaml") == 0
    (folder / "my_agent.py").write_text("mine")
    capsys.readouterr()
    assert exit_code_of("init", folder) == 78
    assert "there is a file" in capsys.readouterr().err
    assert (folder / "my_agent.py").read_text() == "mine"
    with pytest.raises(SystemExit) as end:
        main(["init", str(folder), "--like", "quickstrt"])
    assert end.value.code == 78
    assert "did you mean quickstart?" in capsys.readouterr().err


def test_the_tutorial_shows_the_files_that_init_writes() -> None:
    document = (CHECKOUT / "docs" / "tutorial.md").read_text()
    agent, _ = re.findall(r"^```python\n(.*?)^```", document, re.M | re.S)
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", document, re.M | re.S)
    written = read_project_files(None).contents
    assert written == {"my_agent.py": agent.encode(), "my_recipe.yaml": recipe.encode()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Copy the quick start to a folder beside that of the recipes that extend it."""
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


def test_a_shipped_recipe_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("extends: variants/ppo\ntrial_name: own\n")
    assert load_recipe(path).trainer.objective.preset == "ppo"
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart").trial_name == "demo"
    with pytest.raises(RecipeError, match=r"there is no recipe at quickstrt\n  try: did you mean"):
        load_recipe("quickstrt")


@pytest.mark.parametrize(
    ("named", "text", "hint"),
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
def test_what_cannot_be_extended_is_told(named: str, text: str, hint: str, tmp_path: Path) -> None:
    write(tmp_path, "extends: own.yaml\n", "other.yaml")
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, f"extends: {named}\n"))
    (problem,) = caught.value.problems
    assert text in problem.message
    assert problem.key.endswith(".yaml: extends")
    assert hint in problem.hint


BASE: dict[str, Any] = {
    "experiment_name": "e",
    "trial_name": "t",
    "cluster": {"fileroot": "/tmp"},
    "model": {"path": "/tmp"},
    "train_dataset": {"generator": "examples.quickstart.task:generate"},
    "rollout": {"workflow": "examples.quickstart.agent.ArithmeticAgent"},
}


NEEDED: dict[str, dict[str, Any]] = {"opd": {"teacher": {"path": "/tmp"}}}
"""Keys that a preset needs and cannot set itself."""


def build(preset: str, **objective: Any) -> Recipe:
    objective = NEEDED.get(preset, {}) | objective
    return build_recipe({**BASE, "trainer": {"objective": {"preset": preset, **objective}}})


def find(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_keys_and_nothing_else(name: str) -> None:
    recipe, plain = build(name), build("default")
    values = PRESETS[name].values
    for key, value in values.items():
        assert find(recipe, key) == value
    touched = {*values, "trainer.objective.preset"}
    if name == "dr_grpo":
        touched.add("trainer.objective.loss_scale_tokens")
        assert recipe.trainer.objective.loss_scale_tokens == 512
    for field in ObjectiveConfig.model_fields:
        key = f"trainer.objective.{field}"
        if not any(path == key or path.startswith(f"{key}.") for path in touched):
            assert find(recipe, key) == find(plain, key)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("dr_grpo", 0.2, 0.2),  # table 6
        ("dapo", 0.2, 0.28),  # section 4.1
        ("gspo", 3e-4, 4e-4),  # section 5.1
        ("reinforce_pp", 0.2, 0.2),  # section 4.2.3 of its second version
        ("reinforce_pp_baseline", 0.2, 0.2),
        ("ppo", 0.2, 0.2),  # section 3
        ("dppo", 0.2, 0.2),  # prime-rl's dppo_mask_low and dppo_mask_high
    ],
)
def test_a_preset_clips_where_its_paper_does(name: str, low: float, high: float) -> None:
    objective = build(name).trainer.objective
    assert (objective.clip_low, objective.clip_high) == (low, high)


def build_mixture(own: dict[str, Any], n_samples: int = 4, **objective: Any) -> Recipe:
    sources = [{"path": "/tmp", "name": "plain"}, {"path": "/tmp", "objective": own}]
    return build_recipe(
        {
            **BASE,
            "train_dataset": {"sources": sources},
            "rollout": {**BASE["rollout"], "n_samples": n_samples},
            "trainer": {"objective": objective},
        }
    )


def test_a_source_changes_keys_of_the_recipes_objective_or_begins_with_a_preset() -> None:
    base: dict[str, Any] = {"clip_high": 0.5, "kl": {"coef": 0.1}}
    plain, own = resolve_source_objectives(
        build_mixture({"clip_low": 0.1, "kl": {"coef": 0.2}}, **base)
    )
    assert (plain.clip_low, plain.clip_high, plain.kl.coef) == (0.2, 0.5, 0.1)
    assert (own.clip_low, own.clip_high, own.kl.coef) == (0.1, 0.5, 0.2)
    _, own = resolve_source_objectives(
        build_mixture({"preset": "rloo", "entropy_coef": 0.1}, **base)
    )
    assert (own.baseline, own.clip_high, own.kl.coef) == ("leave_one_out", 0.28, 0.1)
    _, own = resolve_source_objectives(build_mixture({"kl": None, "credit": "turn"}, **base))
    assert own.kl.coef == 0.1
    assert resolve_source_objectives(build("rloo")) == [build("rloo").trainer.objective]


@pytest.mark.parametrize(
    ("own", "key", "message"),
    [
        ({"clip_lo": 0.1}, "clip_lo", "unknown key"),
        ({"clip_low": 2}, "clip_low", "must be less than or equal to 1"),
        ({"proximal": "none"}, "proximal", "proximal is the same for all sources"),
        ({"preset": "dppo"}, "preset", "for all sources, and preset=dppo sets it"),
        ({"kl": {"coef": 0.1}}, "kl", "trainer.objective.kl.coef=0.0"),
        ({"baseline": "value"}, "baseline", "a critic learns the values of all sources"),
        ({"preset": "gspo"}, "ratio_level", "every ratio is 1"),
        ({"surrogate": "cispo"}, "surrogate", "every ratio is 1"),
    ],
)
def test_what_sources_share_cannot_differ(own: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_mixture(own)
    problem = caught.value.problems[0]
    assert problem.key == f"train_dataset.sources.1.objective.{key}"
    assert message in problem.message


def test_a_source_that_compares_episodes_needs_two_of_a_task() -> None:
    alone = {"baseline": "batch_mean", "scale_rewards": "batch"}
    build_mixture({"credit": "turn"}, n_samples=1, **alone)
    with pytest.raises(RecipeError) as caught:
        build_mixture({"baseline": "group_mean"}, n_samples=1, **alone)
    (problem,) = caught.value.problems
    assert problem.key == "rollout.n_samples"
    assert "train_dataset.sources.1.objective.baseline=group_mean compare" in problem.message


def test_the_divisor_of_sums_follows_a_sources_own_aggregation() -> None:
    for preset, own, scales in (
        ("default", {"preset": "dr_grpo"}, (None, 512)),
        ("dr_grpo", {"loss_agg": "token_mean"}, (512, None)),
        ("dr_grpo", {"loss_scale_tokens": 7}, (512, 7)),
    ):
        objectives = resolve_source_objectives(build_mixture(own, preset=preset))
        assert tuple(each.loss_scale_tokens for each in objectives) == scales


def test_the_default_preset_is_no_preset() -> None:
    assert build_recipe(BASE) == build("default")
    tree: dict[str, Any] = {"trainer": {"optimizer": {}}}
    assert apply_preset(tree) == tree


def test_a_key_that_the_recipe_says_wins_and_the_plan_tells_both() -> None:
    recipe = build("gspo", clip_low=0.1)
    assert (recipe.trainer.objective.clip_low, recipe.trainer.minibatches) == (0.1, 4)
    lines = list(describe_preset(recipe.model_dump(mode="json")))
    assert lines[0].startswith("trainer.objective.preset=gspo (arXiv:2507.18071")
    assert "  trainer.objective.clip_low=0.1  (recipe; the preset has 0.0003)" in lines
    assert "  trainer.minibatches=4  (preset)" in lines
    assert list(describe_preset(build("default").model_dump())) == []


def test_a_critic_needs_steps_in_which_the_policy_follows() -> None:
    recipe = build("ppo", critic={"warmup_steps": 99})
    assert recipe.trainer.objective.critic.model == "initial"
    with pytest.raises(RecipeError, match="would never be trained"):
        build("ppo", critic={"warmup_steps": 100})
    assert not any("clip_value" in line for line in find_likely_mistakes(recipe))
    (line,) = (
        line
        for line in find_likely_mistakes(build("ppo", critic={"clip_value": 0.5}))
        if "clip_value" in line
    )
    assert "trainer.minibatches=1" in line


def test_sums_are_divided_by_the_longest_reply_unless_the_recipe_says_otherwise() -> None:
    recipe = build_recipe(
        {
            **BASE,
            "rollout": {**BASE["rollout"], "sampling": {"max_new_tokens": 99}},
            "trainer": {"objective": {"preset": "dr_grpo"}},
        }
    )
    assert recipe.trainer.objective.loss_scale_tokens == 99
    assert build("dr_grpo", loss_scale_tokens=7).trainer.objective.loss_scale_tokens == 7
    assert build("dr_grpo", loss_agg="token_mean").trainer.objective.loss_scale_tokens is None


def test_another_preset_replaces_what_a_resolved_recipe_has_of_the_first(tmp_path: Path) -> None:
    resolved = build("dr_grpo", clip_high=0.9)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(resolved.model_dump(mode="json")))
    assert load_recipe(path) == resolved
    change = "trainer.objective.preset=gspo"
    for recipe in (load_recipe(path, [change]), merge_overrides(resolved, [change])):
        objective = recipe.trainer.objective
        assert (objective.scale_rewards, objective.loss_scale_tokens) == ("group", None)
        assert (objective.clip_low, objective.ratio_level) == (3e-4, "sequence")
        assert objective.clip_high == 0.9  # neither the default nor of the first preset
        assert recipe.trainer.minibatches == 4


def test_a_text_with_a_literal_interpolation_stays_as_it_is() -> None:
    values = build("grpo").model_dump(mode="json")
    values["train_dataset"]["kwargs"] = {"home": "${HOME}"}
    recipe = build_recipe(values)
    merged = merge_overrides(recipe, ["trainer.total_steps=7"])
    assert merged.train_dataset
    assert merged.train_dataset.kwargs == {"home": "${HOME}"}


def test_a_preset_of_a_recipe_that_a_person_wrote_leaves_all_that_it_says(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**BASE, "trainer": {"objective": {"clip_low": 0.2}}}))
    recipe = load_recipe(path, ["trainer.objective.preset=gspo"])
    assert (recipe.trainer.objective.clip_low, recipe.trainer.objective.clip_high) == (0.2, 4e-4)
