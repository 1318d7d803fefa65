from dataclasses import replace

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import LoraConfig, ParallelConfig
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    MoeConfig,
    find_layout_problems,
    parse_architecture,
)
from areal_hpc.trainer.model.families.weight_map import (
    count_tp_shards,
    get_hf_slices,
    get_shard_shape,
    list_parameter_maps,
    to_hf,
    to_megatron,
)

QWEN3 = Architecture(
    "qwen3", layers=2, hidden=12, heads=8, kv_heads=4, head_dim=2, ffn=20, vocab=13,
    norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tied=True, qk_norm=True,
)  # fmt: skip
EXPERTS = MoeConfig(4, 2, 6, norm_weights=True)
MIXTURE = replace(QWEN3, experts=EXPERTS)
FAMILIES = [
    MIXTURE,
    QWEN3,
    replace(QWEN3, tied=False),
    replace(QWEN3, qkv_bias=True, qk_norm=False),
    replace(MIXTURE, experts=replace(EXPERTS, dense_layers=1, shared_ffn=8, is_sigmoid=True)),
]
every_family = pytest.mark.parametrize("arch", FAMILIES)


@pytest.mark.parametrize("tp", [1, 2, 4])
@every_family
def test_cutting_and_joining_gives_every_tensor_back(arch: Architecture, tp: int) -> None:
    for parameter in list_parameter_maps(arch):
        tensors = [torch.randn(tensor.shape) for tensor in parameter.hf]
        shards = []
        for rank in range(count_tp_shards(parameter, tp)):
            slices = get_hf_slices(parameter, arch, tp, rank)
            parts = [tensor[part] for tensor, part in zip(tensors, slices, strict=True)]
            shards.append(to_megatron(parameter, parts, arch, tp))
        assert {tuple(shard.shape) for shard in shards} == {get_shard_shape(parameter, arch, tp)}
        for back, tensor in zip(to_hf(parameter, shards, arch), tensors, strict=True):
            assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    ("arch", "parallel", "keys"),
    [
        (QWEN3, {"tp": 4, "pp": 2}, []),
        (QWEN3, {"tp": 3, "pp": 4}, ["pp", "tp", "tp", "tp"]),
        (QWEN3, {"dp": 2, "ep": 2}, ["ep"]),
        (MIXTURE, {"dp": 2, "ep": 2}, []),
        (MIXTURE, {"dp": 3, "ep": 3}, ["ep"]),
    ],
)
def test_misfit_sizes_named(arch: Architecture, parallel: dict[str, int], keys: list[str]) -> None:
    problems = find_layout_problems(arch, ParallelConfig.model_validate(parallel))
    assert [problem.key for problem in problems] == [f"trainer.parallel.{key}" for key in keys]


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


def test_rotary_settings_are_read_from_old_and_new_configs() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    parameters = {**scaling, "rope_theta": 5e5}
    old = parse_architecture({**CONFIG, "rope_scaling": scaling}, "config.json")
    new = parse_architecture({**CONFIG, "rope_parameters": parameters}, "config.json")
    assert old == new
    assert old.compute_rope_frequencies()[0] == pytest.approx(1.0)
    assert old.compute_rope_frequencies()[-1] == pytest.approx(5e5 ** -(14 / 16) / 8.0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_yarn_is_that_of_transformers(head_dim: int, theta: float) -> None:
    rope = YARN | {"rope_theta": theta}
    config = transformers.Qwen3Config(
        hidden_size=64, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    arch = parse_architecture(config.to_dict(), "config.json")
    assert arch.compute_rope_frequencies() == pytest.approx(expected.tolist(), rel=1e-6)
    assert arch.rope_attention_factor == pytest.approx(scale)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "olmo2"},
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"rope_scaling": {"type": "dynamic"}},
        {"rope_scaling": YARN | {"mscale": 1.0}},
        {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
        {"model_type": "glm4_moe", "num_experts_per_tok": 1},
    ],
)
def test_what_megatron_s_layers_lack_is_trained_by_transformers(change: dict[str, object]) -> None:
    assert not parse_architecture(CONFIG, "config.json").transformers_config
    arch = parse_architecture({**CONFIG, **change}, "config.json")
    assert arch.transformers_config
    problems = find_layout_problems(arch, ParallelConfig(tp=2, pp=2, cp=2))
    assert [problem.key for problem in problems] == ["trainer.parallel.tp", "trainer.parallel.pp"]


def test_an_adapter_is_trained_by_transformers_whatever_its_family() -> None:
    arch = parse_architecture(CONFIG, "config.json", LoraConfig())
    assert arch.transformers_config
    (problem,) = find_layout_problems(arch, ParallelConfig(tp=2, dp=2, cp=2))
    assert problem.key == "trainer.parallel.tp"
    assert problem.message.startswith("an adapter (trainer.lora) is trained with transformers'")


def test_a_state_that_passes_from_token_to_token_keeps_a_row_on_one_rank() -> None:
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    arch = parse_architecture({**CONFIG, "model_type": "qwen3_next", **layers}, "config.json")
    (problem,) = find_layout_problems(arch, ParallelConfig(cp=2))
    assert problem.key == "trainer.parallel.cp"


@pytest.mark.parametrize(
    "change",
    [{"model_type": "bert", "architectures": ["BertForMaskedLM"]}, {"model_type": "mamba"}],
)
def test_what_is_no_decoder_is_named(change: dict[str, object]) -> None:
    config = {**CONFIG, **change}
    if config["model_type"] == "mamba":
        del config["num_attention_heads"]
    with pytest.raises(RecipeError, match="expected a causal language model"):
        parse_architecture(config, "config.json")
