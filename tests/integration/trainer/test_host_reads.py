"""What a step reads back from the device: nothing within its passes, its statistics once after."""

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import ActivationMemoryConfig, ParallelConfig
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.batch.packing import TEMPERATURE_CHANNEL, TrainingRow
from areal_hpc.trainer.batch.training_rows import (
    ADVANTAGE_CHANNEL,
    BEHAVIOR_LOGPROBS_CHANNEL,
    CURRENT_WEIGHTS_CHANNEL,
    STALENESS_CHANNEL,
)
from areal_hpc.trainer.model.families.architecture import Architecture
from areal_hpc.trainer.objective.loss_stats import (
    STEP_HISTOGRAM_BINS,
    STEP_MAXIMUM_NAMES,
    STEP_SUM_NAMES,
    LossStats,
)
from areal_hpc.trainer.step import MicroBatch, make_micro_batches_of_this_rank, run_passes
from tests.integration.trainer.test_recompute import DENSE, LENGTHS, MIXTURE, build
from tests.support.operations import OperationLog
from tests.support.replay_worker import Scenario, make_learner

CHANNELS = (
    ADVANTAGE_CHANNEL,
    BEHAVIOR_LOGPROBS_CHANNEL,
    CURRENT_WEIGHTS_CHANNEL,
    STALENESS_CHANNEL,
    TEMPERATURE_CHANNEL,
)


def make_rows() -> list[TrainingRow]:
    chance, rows = np.random.default_rng(4), []
    for length in LENGTHS:
        mask = (np.arange(length) >= length // 2).astype(np.uint8)
        channels = {name: chance.random(length).astype(np.float32) for name in CHANNELS}
        channels[CURRENT_WEIGHTS_CHANNEL] = (np.arange(length) % 2).astype(np.float32)
        ids = chance.integers(0, 256, length).astype(np.int32)
        rows.append(TrainingRow(ids, mask, channels))
    return rows


def check_reads(scenario: Scenario, paths: RunPaths, arch: Architecture) -> None:
    learner = make_learner(scenario, paths)
    policy = build(arch, ParallelConfig(), ActivationMemoryConfig())
    batches = make_micro_batches_of_this_rank(policy, make_rows(), CHANNELS, max_tokens=64)
    assert len(batches) > 1

    def loss(batch: MicroBatch, logits_1NV: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        return learner._compute_loss(
            batch, logits_1NV, minibatch_index=0, updates_done_share=0, factor=1.0
        )

    with OperationLog() as log:
        stats = run_passes(policy, batches, loss, backward=True)
    assert len(log.names) > 100
    assert log.reads == []
    copies = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.shape)
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", copy)
        reduced = stats.reduce_over_ranks(STEP_SUM_NAMES, STEP_MAXIMUM_NAMES, STEP_HISTOGRAM_BINS)
    assert len(copies) == 1
    assert reduced.sums["tokens"] == sum(len(batch.labels_N) for batch in batches)
    assert 0 < reduced.sums["compared"] < reduced.sums["tokens"]


@pytest.mark.parametrize(
    "scenario",
    [
        {},
        {"objective": {"off_policy_correction": "mask", "off_policy_correction_level": "sequence"}},
    ],
    indirect=True,
)
@pytest.mark.on_ranks(1)
def test_a_dense_network(scenario: Scenario, paths: RunPaths) -> None:
    check_reads(scenario, paths, DENSE)


@pytest.mark.on_ranks(1)
def test_a_mixture_of_experts(scenario: Scenario, paths: RunPaths) -> None:
    check_reads(scenario, paths, MIXTURE)
