"""Input checks: a hub model comes from the cache or is a problem at once; tiny models are made."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from areal_hpc.launch import prepare
from areal_hpc.launch.checks import inputs
from areal_hpc.launch.checks.model import find_model_problems
from areal_hpc.launch.plan import get_base_model_path
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.loading import build_recipe, load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import ROLES, RunPaths
from examples.quickstart.task import demonstrations

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
        for problem in inputs.find_input_problems(recipe, dict.fromkeys(ROLES, "/no"), ())
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
def test_another_network_has_the_same_tokens(recipe: Recipe, tmp_path: Path, network: str) -> None:
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
    texts = {}
    for name, folder in folders.items():
        tree = recipe.model_dump(mode="json")
        objective = tree["trainer"]["objective"]
        if network == "reference":
            objective["kl"] = {"coef": 0.1, "reference": str(folder)}
        else:
            objective |= {"baseline": "value", "critic": {"model": str(folder)}}
        tree["trainer"]["parallel"]["tp"] = 2
        checked = list(find_model_problems(build_recipe(tree)))
        texts[name] = [one.message for one in checked if str(folder) in f"{one.message} {one.key}"]
    assert texts["same"] == []
    assert "the tokenizers of" in texts["other tokens"][0]
    assert "num_attention_heads 3 must be a multiple of tp 2" in texts["odd heads"][0]
    assert "says that the weights are quantized (fp8)" in texts["quantized"][0]
    assert "the configuration is not JSON" in texts["no json"][0]
    assert "there is no model directory" in texts["none"][0]


QUESTION = [{"role": "user", "content": "State the final answer: 3 - 5 + 0 + 6 ="}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def texts() -> list[str]:
    return [message["content"] for demo in demonstrations(500, 1) for message in demo["messages"]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(out, texts(), seed=3)
    return out


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def raw_tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def test_transformers_loads_every_weight_and_runs(model_dir: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    ids = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape[-1] == len(tokenizer)
    assert torch.isfinite(logits).all()


def test_every_id_of_the_model_has_a_token(model_dir: Path, tokenizer: Any) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    vocabulary = config["vocab_size"]
    assert vocabulary == len(tokenizer)
    assert vocabulary % 64 == 0
    assert all(tokenizer.convert_ids_to_tokens(id_) for id_ in range(vocabulary))
    for text, key in (("<|im_end|>", "eos_token_id"), ("<|endoftext|>", "pad_token_id")):
        (id_,) = tokenizer.encode(text)
        assert id_ == config[key] == getattr(tokenizer, key)


@given(text=st.text())
def test_any_text_survives_and_digits_stay_single(raw_tokenizer: Tokenizer, text: str) -> None:
    encoding = raw_tokenizer.encode(text, add_special_tokens=False)
    assert raw_tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    tokens = raw_tokenizer.encode("2026-11=2015").tokens
    assert [token for token in tokens if token.isdigit()] == list("2026112015")


def test_chat_template_is_plain_chatml_and_extends_its_own_prefix(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>user\nState the final answer: 3 - 5 + 0 + 6 =<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len(tokenizer.encode(prompt)) <= 34, "the quick start's context is short"
    answered = [*QUESTION, {"role": "assistant", "content": "Answer: 4"}]
    rendered = tokenizer.apply_chat_template(answered, tokenize=False)
    assert rendered == prompt + "Answer: 4<|im_end|>\n"


def test_chat_template_lists_tools_after_the_system_message(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    rendered = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    system, rest = rendered.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    listed = system.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(listed) == TOOL
    assert "<tool_call>" in system
    assert rest.startswith("<|im_start|>user\n")


@pytest.mark.parametrize("arguments", ['{"a": 3}', {"a": 3}])
def test_chat_template_renders_calls_and_their_results(tokenizer: Any, arguments: object) -> None:
    messages = [
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": arguments}}],
        },
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": [{"type": "text", "text": "8"}]},
    ]
    rendered = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert (
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n"
        "<tool_response>\n8\n</tool_response><|im_end|>\n"
    ) in rendered


def test_same_seed_makes_the_same_model(model_dir: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "again", texts(), seed=3)
    make_tiny_model(tmp_path / "other", texts(), seed=4)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (model_dir / name).read_bytes()
    embedding = "model.embed_tokens.weight"
    weights = load_file(model_dir / "model.safetensors")[embedding]
    other = load_file(tmp_path / "other" / "model.safetensors")[embedding]
    assert not np.array_equal(weights, other)
    assert weights.dtype == np.float32
    assert abs(float(weights.std()) - 0.05) < 0.002


def test_making_a_model_does_not_import_torch() -> None:
    probe = "import sys, areal_hpc.launch.tiny_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
