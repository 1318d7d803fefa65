"""Recomputed and offloaded activations: the same gradients, bit for bit, in every layout."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import ActivationMemoryConfig, ParallelConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer import memory
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model.families.architecture import Architecture, MoeConfig
from areal_hpc.trainer.model.hf_weights import load_hf
from areal_hpc.trainer.model.policy import TrainedNetwork, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.step import MicroBatch, make_micro_batches_of_this_rank, run_forward_backward
from tests.support.layout_worker import exported_gradients
from tests.support.replay_worker import Scenario
from tests.support.thoroughness import choose

DENSE = Architecture("qwen2", 3, 64, 8, 4, 8, 128, 256, 1e-6, 1e4, None, tied=True)
MIXTURE = replace(DENSE, family="qwen3_moe", experts=MoeConfig(4, 2, 48, norm_weights=True))
SETTINGS = [
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 1},
    {"recompute": "selective"},
    {"recompute": "full", "offload": True},
    {"offload": True},
]
LAYOUTS = [
    {"parallel": {"tp": 2}},
    {"parallel": {"pp": 2}},
    {"parallel": {"cp": 2}},
    {"parallel": {"dp": 2, "ep": 2}},
]
LENGTHS = (60, 33, 47, 21)


def build(
    arch: Architecture, parallel: ParallelConfig, activations: ActivationMemoryConfig
) -> TrainedNetwork:
    policy = build_policy(arch, parallel, torch.float32, torch.device("cpu"), activations)
    parts = {}

    def draw(tensor: object, part: object) -> torch.Tensor:
        name, shape = tensor.name, tensor.shape  # type: ignore[attr-defined]
        if name not in parts:
            chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parts[name] = torch.randn(shape, generator=chance) * 0.1
        return parts[name][part]  # type: ignore[index]

    load_hf(policy, draw)
    return policy


def make_batches(policy: TrainedNetwork) -> list[MicroBatch]:
    rows = []
    for length in LENGTHS:
        mask = (np.arange(length) >= length // 2).astype(np.uint8)
        rows.append(TrainingRow(np.arange(length, dtype=np.int32) * 7 % 256, mask, {}))
    batches = make_micro_batches_of_this_rank(policy, rows, [], max_tokens=64)
    assert len(batches) > 1
    return batches


def compute_gradients(policy: TrainedNetwork) -> dict[str, torch.Tensor]:
    run_forward_backward(
        policy,
        make_batches(policy),
        lambda _, logprobs_N: (-logprobs_N.sum(), LossStats({"tokens": len(logprobs_N)})),
        backward=True,
    )
    return exported_gradients(policy)


def check_settings(parallel: ParallelConfig) -> None:
    memory.MIN_OFFLOADED_BYTES = 1
    for arch in (DENSE, MIXTURE):
        own = parallel if arch.experts else parallel.model_copy(update={"ep": 1})
        expected = compute_gradients(build(arch, own, ActivationMemoryConfig()))
        assert any(tensor.abs().max() > 0 for tensor in expected.values())
        for setting in SETTINGS:
            policy = build(arch, own, ActivationMemoryConfig.model_validate(setting))
            found = compute_gradients(policy)
            different = [name for name in expected if not torch.equal(found[name], expected[name])]
            assert different == [], (arch.family, setting)


@pytest.mark.on_ranks(1)
def test_gradients_on_one_rank(scenario: Scenario, paths: RunPaths) -> None:
    check_settings(ParallelConfig())


@pytest.mark.parametrize(
    "scenario",
    choose(LAYOUTS, LAYOUTS[1]),
    indirect=True,
)
@pytest.mark.on_ranks(2)
def test_gradients_on_two_ranks(scenario: Scenario, paths: RunPaths) -> None:
    check_settings(ParallelConfig.model_validate(scenario["trainer"]["parallel"]))
