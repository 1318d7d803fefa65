"""Layers keep as many bytes for the backward pass as `plan` counts."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import LoraConfig, ParallelConfig, TrainerConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model.activation_memory import count_stage_activation_bytes
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    MoeConfig,
    parse_architecture,
)
from areal_hpc.trainer.model.policy import TORCH_DTYPE_BY_NAME, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.step import (
    MicroBatch,
    make_micro_batches_of_this_rank,
    run_forward_backward,
)
from tests.support.rank_server import RankServer
from tests.support.reference_models import TRANSFORMERS_CONFIGS
from tests.support.replay_worker import Scenario
from tests.support.thoroughness import choose

# Latent attention and experts; four norms; attention that is written out; a state.
FAMILIES = choose(TRANSFORMERS_CONFIGS, "deepseek_v3", "gemma3", "gpt_oss", "qwen3_5_moe")
TOKENS = 512
MOST_ERROR, MOST_MEGATRON_ERROR = 0.05, 0.04
# As many key-value heads as heads: without FlashAttention grouped heads are copied.
WIDE = Architecture("llama", 1, 256, 8, 8, 32, 768, 512, 1e-6, 1e4, None, tied=True)
EXPERTS = MoeConfig(4, 2, 192, norm_weights=True)
SHARED = replace(EXPERTS, dense_layers=2, shared_ffn=192, is_sigmoid=True, scale=1.5)
MEGATRON = (
    replace(WIDE, qkv_bias=True),
    replace(WIDE, qk_norm=True),
    replace(WIDE, qk_norm=True, experts=EXPERTS),
    replace(WIDE, rotary_share=0.5, experts=SHARED),
)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "moe_intermediate_size": 128,
}
STATE_SIZES = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
WIDTHS: dict[str, dict[str, Any]] = {
    # A window has a mask here, which FlashAttention has not.
    "mistral": {"sliding_window": None},
    "qwen2_window": {"max_window_layers": 9},
    "deepseek_v3": {
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "head_dim": 32,
    },
    "gpt_oss": {"intermediate_size": 128},
    "qwen3_next": {**STATE_SIZES, "shared_expert_intermediate_size": 128},
    "qwen3_5": STATE_SIZES,
    "qwen3_5_moe": {**STATE_SIZES, "shared_expert_intermediate_size": 128},
}


def make_architecture(family: str, layers: int, lora: LoraConfig | None = None) -> Architecture:
    kind, options = TRANSFORMERS_CONFIGS[family]
    sizes = {**options, **SIZES, **WIDTHS.get(family, {}), "num_hidden_layers": layers}
    kinds = ["full_attention"]
    if "linear_attention" in options.get("layer_types", ()):
        kinds = ["linear_attention", "full_attention"]
    if "layer_types" in options:
        sizes["layer_types"] = (kinds * layers)[:layers]
    config = getattr(transformers, kind)(**sizes, pad_token_id=0)
    return parse_architecture(config.to_dict(), family, lora)


def measure_kept_bytes(arch: Architecture, config: TrainerConfig) -> int:
    """Measure the new tensors between forward and backward pass, in bytes."""
    dtype = TORCH_DTYPE_BY_NAME[config.dtype]
    policy = build_policy(arch, ParallelConfig(), dtype, torch.device("cpu"), config.activations)
    for parameter in policy.gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    mask = np.zeros(TOKENS, np.uint8)
    mask[-1] = 1
    row = TrainingRow(np.arange(TOKENS, dtype=np.int32) % arch.vocab, mask, {})
    batches = make_micro_batches_of_this_rank(policy, [row], [], TOKENS)
    before = list_storages()
    saved: list[torch.Tensor] = []
    kept_bytes = 0

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)  # so Python knows it, and its address stays taken
        return tensor

    def end_forward(_: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        nonlocal kept_bytes
        # Recomputed tensors are saved anew in the backward pass; discarded ones have size 0 now.
        storages = list_storages()
        kept_bytes = sum(size for address, size in storages.items() if address not in before)
        return logprobs_N.sum(), LossStats()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        run_forward_backward(policy, batches, end_forward, backward=True)
    return kept_bytes


def list_storages() -> dict[int, int]:
    """Return bytes by address."""
    gc.collect()
    storages = [
        candidate.untyped_storage()
        for candidate in gc.get_objects()
        if type(candidate) in (torch.Tensor, torch.nn.Parameter) and candidate.device.type == "cpu"
    ]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def check_layers(
    fewer: Architecture, more: Architecture, config: TrainerConfig, most_error: float = MOST_ERROR
) -> None:
    measured = measure_kept_bytes(more, config) - measure_kept_bytes(fewer, config)
    counted = [
        count_stage_activation_bytes(arch, config, range(arch.layers), TOKENS)
        for arch in (fewer, more)
    ]
    assert measured == pytest.approx(counted[1] - counted[0], rel=most_error)


def check_megatron(scenario: Scenario, paths: RunPaths) -> None:
    for arch in MEGATRON:
        config = TrainerConfig(dtype="float32")
        check_layers(arch, replace(arch, layers=3), config, MOST_MEGATRON_ERROR)


def check_family(scenario: Scenario, paths: RunPaths) -> None:
    fewer, more = (make_architecture(scenario["family"], layers) for layers in (2, 4))
    check_layers(fewer, more, TrainerConfig(dtype="bfloat16"))


def check_adapted_layers(scenario: Scenario, paths: RunPaths) -> None:
    lora = LoraConfig(rank=4)
    fewer, more = (make_architecture("mistral", layers, lora) for layers in (2, 4))
    check_layers(fewer, more, TrainerConfig(dtype="bfloat16"))


def check_recomputed_layers(scenario: Scenario, paths: RunPaths) -> None:
    fewer, more = (make_architecture("qwen3_5", layers) for layers in (2, 6))
    for recompute in ("full", "selective", 1):
        config = TrainerConfig.model_validate({"dtype": "bfloat16", "recompute": recompute})
        check_layers(fewer, more, config)


def run_on_a_rank(
    check: Callable[..., None], ranks: RankServer, tmp_path: Path, **scenario: Any
) -> None:
    outcome = ranks.call(check, RunPaths(tmp_path), 1, **scenario)
    assert outcome.codes == [0], outcome.log


@pytest.mark.parametrize("check", [check_megatron, check_adapted_layers, check_recomputed_layers])
def test_layers_keep_what_is_counted(
    ranks: RankServer, tmp_path: Path, check: Callable[..., None]
) -> None:
    run_on_a_rank(check, ranks, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_transformers_keep_what_is_counted(
    ranks: RankServer, tmp_path: Path, family: str
) -> None:
    run_on_a_rank(check_family, ranks, tmp_path, family=family)
