import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from areal_hpc.launch.tiny_model import make_tiny_model
from examples.quickstart.task import demonstrations

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
    found = raw_tokenizer.encode(text, add_special_tokens=False)
    assert raw_tokenizer.decode(found.ids, skip_special_tokens=False) == text
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
    one = load_file(model_dir / "model.safetensors")[embedding]
    other = load_file(tmp_path / "other" / "model.safetensors")[embedding]
    assert not np.array_equal(one, other)
    assert one.dtype == np.float32
    assert abs(float(one.std()) - 0.05) < 0.002


def test_making_a_model_does_not_import_torch() -> None:
    probe = "import sys, areal_hpc.launch.tiny_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
