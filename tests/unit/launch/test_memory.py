"""Memory estimates: parameters equal real models and the table of names, the rest arithmetic."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.launch import resources
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.recipe.sections.trainer import LoraConfig, ParallelConfig, TrainerConfig
from areal_hpc.trainer.model import activation_memory, memory_estimate, parameter_counts
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    divide_layers_over_stages,
    parse_architecture,
)
from areal_hpc.trainer.model.families.weight_map import (
    EMBEDDING_NAME,
    FINAL_NORM_NAME,
    OUTPUT_LAYER_NAME,
    get_shard_shape,
    list_parameter_maps,
)

MODELS = Path(__file__).parents[2] / "samples" / "models"
COUNTS = {
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen2.5-Math-7B-Instruct": 7_615_616_512,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "GLM-4.5-Air": 106_852_251_264,
}
"""Parameters in the models' safetensors files, without a tied head and layers that predict
further tokens."""


@functools.cache
def architecture(name: str) -> Architecture:
    return parse_architecture(json.loads((MODELS / name / "config.json").read_bytes()), name)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_counted_as_in_the_published_models(name: str) -> None:
    assert parameter_counts.count_model_parameters(architecture(name)) == COUNTS[name]


weight_map_of = functools.cache(list_parameter_maps)


def held_by(arch: Architecture, split: ParallelConfig, stage: int) -> tuple[int, int]:
    """Count the parameters of one rank of a stage by the table of names, experts apart."""
    counts = {False: 0, True: 0}
    layers, rows = divide_layers_over_stages(arch.layers, split.pp), weight_map_of(arch)
    first = sum(layers[:stage])
    for row in rows:
        if row.layer is not None:
            held = first <= row.layer < first + layers[stage]
        else:
            held = {EMBEDDING_NAME: stage == 0}.get(row.megatron, stage == split.pp - 1)
        if held and (row.expert or 0) < (arch.experts.count // split.ep if arch.experts else 1):
            counts[row.expert is not None] += math.prod(get_shard_shape(row, arch, split.tp))
        if row.megatron == EMBEDDING_NAME and arch.tied and 0 < stage == split.pp - 1:
            counts[False] += math.prod(get_shard_shape(row, arch, split.tp))
    names = {row.megatron for row in rows}
    assert FINAL_NORM_NAME in names
    assert arch.tied != (OUTPUT_LAYER_NAME in names)
    return counts[False], counts[True]


@pytest.mark.parametrize(
    "split", [{}, {"tp": 2}, {"pp": 4}, {"pp": 5}, {"tp": 2, "pp": 2, "ep": 2}]
)
@pytest.mark.parametrize("name", COUNTS)
def test_a_ranks_parameters_are_those_of_the_name_table(name: str, split: dict[str, int]) -> None:
    arch = architecture(name)
    ep = split.get("ep", 1) if arch.experts else 1
    parallel = ParallelConfig.model_validate({**split, "ep": ep})
    for stage in range(parallel.pp):
        counted = parameter_counts.count_stage_parameters(arch, parallel, stage)
        assert counted == held_by(arch, parallel, stage)


def trainer(**split: Any) -> TrainerConfig:
    return TrainerConfig(parallel=ParallelConfig(**split), max_tokens_per_microbatch=8192)


def test_state_is_eighteen_bytes_a_parameter_in_bfloat16_and_sixteen_in_float32() -> None:
    arch, count = architecture("Qwen3-0.6B"), COUNTS["Qwen3-0.6B"]
    for dtype, size in (("bfloat16", 18), ("float32", 16)):
        memory = memory_estimate.estimate_trainer_memory(
            arch, TrainerConfig.model_validate({"dtype": dtype})
        )
        assert memory.parameters + memory.gradients + memory.optimizer == size * count


def test_what_an_adapter_freezes_has_no_gradients_and_no_optimizer() -> None:
    arch, count = architecture("Qwen3-4B"), COUNTS["Qwen3-4B"]
    lora = LoraConfig(rank=8)
    queries, keys = 2560 + 32 * 128, 2560 + 8 * 128
    adapter = 36 * 8 * (2 * queries + 2 * keys + 3 * (2560 + 9728))
    assert parameter_counts.count_adapter_parameters(arch, lora) == adapter
    memory = memory_estimate.estimate_trainer_memory(replace(arch, lora=lora), trainer(dp=2))
    assert memory.parameters == 2 * (count + adapter)
    assert (memory.gradients, memory.optimizer) == (4 * adapter, 6 * adapter)
    copy = memory_estimate.estimate_checkpoint_copy_bytes(replace(arch, lora=lora), trainer(dp=2))
    assert copy == 7 * adapter
    some = lora.model_copy(update={"target_modules": ("q_proj", "v_proj")})
    assert parameter_counts.count_adapter_parameters(arch, some) == 36 * 8 * (queries + keys)


def test_the_optimizer_is_shared_by_data_and_context_parallel_ranks() -> None:
    arch = architecture("Qwen2.5-Math-7B-Instruct")
    unshared = memory_estimate.estimate_trainer_memory(arch, trainer())
    shared = memory_estimate.estimate_trainer_memory(arch, trainer(dp=4, cp=2))
    assert (shared.optimizer, shared.gradients) == (unshared.optimizer // 8, unshared.gradients)


def test_a_frozen_network_waits_on_the_host_and_takes_the_place_of_activations() -> None:
    large, small = architecture("Qwen2.5-Math-7B-Instruct"), architecture("Qwen3-0.6B")
    config = trainer(tp=2, dp=2)
    base = memory_estimate.estimate_trainer_memory(small, config)
    scored = memory_estimate.estimate_trainer_memory(small, config, frozen=[small, large])
    sizes = [sum(held_by(arch, ParallelConfig(tp=2), 0)) * 2 for arch in (small, large)]
    assert scored.host_frozen == sum(sizes)
    layout = ParallelConfig(tp=2)
    layer = activation_memory.count_layer_activation_bytes(large, layout, "bfloat16", 8192)
    assert scored.scoring == sizes[1] + layer
    assert scored.total == base.total - base.activations + max(base.activations, scored.scoring)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_a_critic_takes_what_a_policy_without_a_vocabulary_head_would(pp: int, tp: int) -> None:
    policy, critic = architecture("Qwen2.5-Math-7B-Instruct"), architecture("Qwen3-0.6B")
    config = trainer(tp=tp, pp=pp, dp=2)
    for stage in range(pp):
        alone = memory_estimate.estimate_stage_memory(policy, config, stage)
        both = memory_estimate.estimate_stage_memory(policy, config, stage, critic=critic)
        untied = replace(critic, tied=False)
        head = sum(held_by(untied, ParallelConfig(tp=tp, pp=pp), stage))
        if stage == pp - 1:
            head -= (critic.vocab // tp - 1) * critic.hidden
        assert both.parameters - alone.parameters == 2 * head
        assert both.gradients - alone.gradients == 4 * head
        assert both.optimizer - alone.optimizer == pytest.approx(12 * head / 2, abs=12)
        assert both.activations == alone.activations, "the larger network's, one after the other"
    copies = [memory_estimate.estimate_checkpoint_copy_bytes(policy, config, network)
              for network in (None, critic)]  # fmt: skip
    assert copies[1] > copies[0]
    assert parameter_counts.count_critic_parameters(critic) == 596_049_920 + critic.hidden


def test_serving_by_hand() -> None:
    arch = architecture("Qwen2.5-Math-7B-Instruct")
    config = InferenceConfig(max_total_tokens=1000)
    memory = resources.estimate_serving_memory(arch, config, "bfloat16", None)
    assert memory.weights == 2 * COUNTS["Qwen2.5-Math-7B-Instruct"]
    assert memory.kv_per_token == 2 * 28 * 4 * 128 * 2
    assert memory.total == memory.weights + 1000 * 57_344
    on_eight = resources.estimate_serving_memory(arch, InferenceConfig(tp=8), "bfloat16", None)
    assert on_eight.kv_per_token == 57_344 // 4
    # without a number the cache takes what mem_fraction_static leaves
    gpu = 80 * memory_estimate.GIB
    memory = resources.estimate_serving_memory(arch, InferenceConfig(), "bfloat16", gpu)
    assert memory.kv_tokens == (int(gpu * 0.85) - memory.weights) // 57_344
    assert (
        resources.estimate_serving_memory(arch, InferenceConfig(), "bfloat16", None).kv_tokens
        is None
    )


@pytest.mark.parametrize(
    ("gpu_gib", "inference", "keys"),
    [
        (80, {}, []),
        (24, {}, ["trainer.parallel"]),
        (80, {"max_total_tokens": 2_000_000}, ["inference.tp"]),
        (12, {}, ["trainer.parallel", "inference.tp"]),
        (80, {"max_total_tokens": 256, "context_length": 512}, ["inference.context_length"]),
    ],
)
def test_misfits_are_told(gpu_gib: int, inference: dict[str, Any], keys: list[str]) -> None:
    arch, gpu = architecture("Qwen2.5-Math-7B-Instruct"), gpu_gib * memory_estimate.GIB
    config = InferenceConfig.model_validate(inference)
    training = memory_estimate.estimate_trainer_memory(arch, trainer(tp=2, dp=4))
    serving = resources.estimate_serving_memory(arch, config, "bfloat16", gpu)
    problems = resources.find_memory_problems(training, serving, config, gpu)
    assert [problem.key for problem in problems] == keys


def test_layers_that_do_not_divide_are_spread_over_the_middle_stages() -> None:
    assert divide_layers_over_stages(94, 4) == (23, 24, 24, 23)
    assert divide_layers_over_stages(7, 4) == (2, 2, 2, 1)
    assert divide_layers_over_stages(5, 2) == (3, 2)
    assert divide_layers_over_stages(36, 4) == (9, 9, 9, 9)
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            parts = divide_layers_over_stages(layers, stages)
            assert (sum(parts), len(parts)) == (layers, stages)
            assert parts[-1] == min(parts) >= max(parts) - 1


def test_an_offloaded_optimizer_is_on_the_host_but_for_one_chunk() -> None:
    arch = architecture("Qwen3-32B")
    layout = {"tp": 8, "dp": 2}
    config = {"parallel": layout, "offload": {"optimizer": True}}
    usual = memory_estimate.estimate_trainer_memory(arch, trainer(**layout))
    memory = memory_estimate.estimate_trainer_memory(arch, TrainerConfig.model_validate(config))
    assert (usual.host_optimizer, memory.host_optimizer) == (0, usual.optimizer)
    assert memory.optimizer == 12 * memory_estimate.OPTIMIZER_CHUNK_ELEMENTS < usual.optimizer / 10


def test_the_change_that_fits_may_be_the_offload_of_the_optimizer() -> None:
    arch = architecture("Qwen2.5-Math-7B-Instruct")
    config = TrainerConfig(max_tokens_per_microbatch=256)
    state = memory_estimate.estimate_trainer_memory(arch, config)
    gpu = state.total - state.optimizer + 2 * memory_estimate.GIB
    change = memory_estimate.describe_cheapest_fitting_change(arch, config, gpu)
    assert change.startswith("trainer.recompute=full trainer.offload.optimizer=true takes ")
