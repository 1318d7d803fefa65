"""A real SGLang reports the experts of its tokens as transformers computes them."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
import transformers

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.wire.trajectory import MixtureShape
from tests.support.chatml import TRAINING_TEXT
from tests.support.deadlines import scaled
from tests.support.sglang_server import serving

MIXTURE = MixtureShape(layers=3, per_token=2, experts=8)


def make_tiny_mixture(folder: Path, seed: int = 4) -> None:
    make_tiny_model(folder, TRAINING_TEXT * 20, seed=5)
    tiny = json.loads((folder / "config.json").read_bytes())
    ids = {key: tiny[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=MIXTURE.layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=96, moe_intermediate_size=32,
        num_experts=MIXTURE.experts, num_experts_per_tok=MIXTURE.per_token, norm_topk_prob=True,
        max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.2, **ids,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


PROMPT = [int(token_id) for token_id in np.random.default_rng(2).integers(3, 250, 40)]
Routes = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a random mixture, and the same with other routers."""
    first, second = (tmp_path_factory.mktemp("models") / name for name in ("first", "second"))
    make_tiny_mixture(first)
    shutil.copytree(first, second)
    file = second / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name in tensors:
        if "mlp.gate.weight" in name:
            tensors[name] += 0.1 * torch.randn_like(tensors[name])
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    return first, second


@pytest.fixture(scope="module")
def url(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log_path = tmp_path_factory.mktemp("sglang") / "log"
    with serving(models[0], log_path, "--enable-return-routed-experts") as address:
        yield address


def post(url: str, route: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}/{route}", json=body, timeout=scaled(60), trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else None


def make_call(prompt: list[int], tokens: int, start: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_routed_experts": True,
        "routed_experts_start_len": start,
    }


def generate(url: str, prompt: list[int], tokens: int, start: int = 0) -> dict[str, Any]:
    reply: dict[str, Any] = post(url, "generate", make_call(prompt, tokens, start))
    return reply


def stream(
    url: str, prompt: list[int], tokens: int, on_event: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    body = make_call(prompt, tokens, 0) | {"stream": True}
    timeout = scaled(60)
    with httpx.stream(
        "POST", f"{url}/generate", json=body, timeout=timeout, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                on_event()
                yield json.loads(line[6:])


def routes_in(reply: dict[str, Any]) -> Routes:
    packed = base64.b64decode(reply["meta_info"]["routed_experts"])
    return (
        np.frombuffer(packed, "u1").reshape(-1, MIXTURE.layers, MIXTURE.per_token).astype(np.int64)
    )


def routes_of(model_dir: Path, ids: list[int]) -> Routes:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    chosen = [torch.topk(layer.view(len(ids), -1), MIXTURE.per_token).indices for layer in logits]
    return torch.stack(chosen, 1).numpy()


def load(url: str, model: Path, version: str) -> None:
    body = {"model_path": str(model), "weight_version": version}
    post(url, "update_weights_from_disk", body)


def test_prompt_and_reply_come_with_their_experts_from_the_cache_too(
    url: str, models: tuple[Path, Path]
) -> None:
    load(url, models[0], "first")
    for start in (0, 0, 25):
        reply = generate(url, PROMPT, 12, start)
        expected = routes_of(models[0], PROMPT + reply["output_ids"])[start:-1]
        assert np.array_equal(routes_in(reply), expected)
        assert start == 0 or reply["meta_info"]["cached_tokens"] == len(PROMPT) - 1
    reply = generate(url, PROMPT, 5)
    longer = PROMPT + reply["output_ids"] + [5, 6, 7]
    start = len(longer) - 4  # the last sampled token has been in no pass before
    reply = generate(url, longer, 3, start)
    assert reply["meta_info"]["cached_tokens"] >= start
    assert np.array_equal(
        routes_in(reply), routes_of(models[0], longer + reply["output_ids"])[start:-1]
    )


def test_a_retracted_request_keeps_the_experts_that_sampled_its_tokens(
    url: str, models: tuple[Path, Path]
) -> None:
    load(url, models[0], "first")
    events: list[dict[str, Any]] = []
    call = Thread(target=lambda: events.extend(stream(url, PROMPT[:20], 300, has_begun.set)))
    has_begun = Event()
    call.start()
    assert has_begun.wait(scaled(60))
    post(url, "pause_generation", {"mode": "retract"})
    load(url, models[1], "new")
    post(url, "continue_generation", {})
    call.join()
    spans = events[-1]["meta_info"]["weight_versions"]
    assert len(spans) == 2, spans
    cut = 20 + spans[0]["end"] - 1
    ids = PROMPT[:20] + [token_id for event in events for token_id in event["output_ids"]]
    routes = routes_in(events[-1])
    old, new = (routes_of(model, ids)[:-1] for model in models)
    assert np.array_equal(routes[:cut], old[:cut])
    assert np.array_equal(routes[cut:], new[cut:])
    assert not np.array_equal(old[:cut], new[:cut])
