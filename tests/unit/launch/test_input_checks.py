"""A model of the hub is used from the cache as it lies there, and its absence is told at once."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from areal_hpc.launch import prepare
from areal_hpc.launch.checks import inputs
from areal_hpc.launch.checks.model import find_model_problems
from areal_hpc.launch.plan import get_base_model_path
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.loading import build_recipe, load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import RunPaths

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
COMMIT = "0123abcd" * 5
ROW = '{"messages": [{"role": "user", "content": "2 + 2"}]}\n'


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks.jsonl").write_text(ROW)
    return load_recipe(
        QUICKSTART,
        [
            "model={hub: someone/tiny, tiny: null}",
            "sft=null",
            f"train_dataset={{path: {tmp_path}/tasks.jsonl, generator: null, kwargs: {{}}}}",
            "valid_dataset=null",
            f"cluster.fileroot={tmp_path}/runs",
        ],
    )


def in_the_cache(tmp_path: Path) -> Path:
    repo = tmp_path / "cache" / "models--someone--tiny"
    folder = repo / "snapshots" / COMMIT
    make_tiny_model(folder, ["one two three"], seed=1, hidden=32, heads=2, kv_heads=2, head_dim=16)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return folder


def model_problems(recipe: Recipe) -> list[str]:
    return [
        problem.message
        for problem in inputs.find_input_problems(recipe, {"agents": "/no", "train": "/no"}, ())
        if problem.key.startswith("model")
    ]


def test_a_name_that_the_hub_cannot_have_is_a_problem(recipe: Recipe) -> None:
    model = recipe.model.model_copy(update={"hub": "someone/tiny--8B"})
    (problem,) = find_model_problems(recipe.model_copy(update={"model": model}))
    assert problem.key == "model.hub"
    assert "Cannot have -- or .. in repo_id" in problem.message


def test_an_absent_model_is_a_problem_before_anything_starts(recipe: Recipe) -> None:
    (message,) = model_problems(recipe)
    assert "someone/tiny (revision main) is not in the Hugging Face cache" in message


def test_a_model_of_the_cache_is_linked_into_the_run(recipe: Recipe, tmp_path: Path) -> None:
    folder = in_the_cache(tmp_path)
    assert model_problems(recipe) == []
    paths = RunPaths(recipe.run_dir)
    for _ in range(2):  # the second time, as a run that continues
        prepare.write_run_inputs(recipe, paths, lambda line: None, "/no", ())
    assert get_base_model_path(recipe, paths).resolve() == folder


def test_what_sglang_or_a_critic_cannot_do_is_a_problem(recipe: Recipe, tmp_path: Path) -> None:
    folder = in_the_cache(tmp_path)
    config = json.loads((folder / "config.json").read_bytes())
    del config["use_sliding_window"]
    changed = config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(changed | {"sliding_window": None}))
    assert model_problems(recipe) == []
    (folder / "config.json").write_text(json.dumps(changed | {"sliding_window": 64}))
    (message,) = model_problems(recipe)
    assert "SGLang does not read for mistral" in message
    (folder / "config.json").write_text(json.dumps(changed | {"sliding_window": None}))
    tree = recipe.model_dump(mode="json")
    tree["trainer"]["objective"] |= {"baseline": "value", "critic": {"model": "initial"}}
    (problem,) = find_model_problems(Recipe.model_validate(tree))
    assert "a critic has layers of Megatron-core" in problem.message


@pytest.mark.parametrize("network", ["reference", "critic"])
def test_another_network_has_the_policys_tokens_and_divides_as_it_does(
    recipe: Recipe, tmp_path: Path, network: str
) -> None:
    in_the_cache(tmp_path)
    names = ("same", "other tokens", "odd heads", "quantized", "no json", "none")
    folders = {name: tmp_path / name for name in names}
    make_tiny_model(folders["same"], ["one two three"], hidden=48, heads=4, kv_heads=2)
    make_tiny_model(folders["other tokens"], ["vier fünf sechs"], hidden=48, heads=4, kv_heads=2)
    make_tiny_model(folders["odd heads"], ["one two three"], hidden=48, heads=3, kv_heads=3)
    for name in ("quantized", "no json"):
        make_tiny_model(folders[name], ["one two three"], hidden=48, heads=4, kv_heads=2)
    config = folders["quantized"] / "config.json"
    form = {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(json.loads(config.read_bytes()) | form))
    (folders["no json"] / "config.json").write_text('{"model_type": "qwen2", ')
    found = {}
    for name, folder in folders.items():
        tree = recipe.model_dump(mode="json")
        objective = tree["trainer"]["objective"]
        if network == "reference":
            objective["kl"] = {"coef": 0.1, "reference": str(folder)}
        else:
            objective |= {"baseline": "value", "critic": {"model": str(folder)}}
        tree["trainer"]["parallel"]["tp"] = 2
        checked = list(find_model_problems(build_recipe(tree)))
        found[name] = [one.message for one in checked if str(folder) in f"{one.message} {one.key}"]
    assert found["same"] == []
    assert "the tokenizers of" in found["other tokens"][0]
    assert "num_attention_heads 3 must be a multiple of tp 2" in found["odd heads"][0]
    assert "says that the weights are quantized (fp8)" in found["quantized"][0]
    assert "the configuration is not JSON" in found["no json"][0]
    assert "there is no model directory" in found["none"][0]
