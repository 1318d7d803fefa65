"""Operations of an update, counted by hand, and peaks of GPUs."""

import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    MoeConfig,
)
from areal_hpc.trainer.model.memory_estimate import count_model_parameters
from areal_hpc.trainer.model.utilization import count_training_flops, find_peak_flops_per_s

DENSE = Architecture("qwen2", 3, 8, 4, 2, 2, 16, 100, 1e-6, 1e4, None, tied=True)
MIXTURE = Architecture(
    "qwen3_moe", 3, 8, 4, 2, 2, 16, 100, 1e-6, 1e4, None, tied=True,
    experts=MoeConfig(8, 2, 6, norm_weights=True),
)  # fmt: skip
QKV_AND_OUT = 8 * 8 + 2 * 4 * 8 + 8 * 8


def test_a_dense_network() -> None:
    weights = 3 * (QKV_AND_OUT + 3 * 8 * 16)
    attention = 3 * (4 * 2) * (5 * 5 + 7 * 7)
    expected = 3 * (2 * weights * 12 + 2 * 100 * 8 * 4 + 2 * attention)
    assert count_training_flops(DENSE, [5, 7], 4) == expected


def test_of_a_mixture_the_experts_that_a_token_visits_count() -> None:
    weights = 3 * (QKV_AND_OUT + 8 * 8 + 2 * 3 * 8 * 6)
    assert count_training_flops(MIXTURE, [1], 0) == 3 * (2 * weights + 2 * 3 * 8)


def test_short_rows_of_a_known_model_take_six_operations_a_weight() -> None:
    arch = Architecture("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e-6, 1e6, None, tied=False)
    assert count_model_parameters(arch) == 8_190_735_360  # as its authors publish
    # 8.19e9 weights, of which the embedding, 0.62e9, is looked up.
    assert count_training_flops(arch, [100], 100) == pytest.approx(6 * 7.57e9 * 100, rel=0.01)


@pytest.mark.parametrize(
    "name", ["AMD Instinct MI300X", "NVIDIA RTX A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_no_peak_is_made_up(name: str) -> None:
    assert find_peak_flops_per_s(name) is None
