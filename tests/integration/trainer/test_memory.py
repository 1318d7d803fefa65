"""The plan's estimate of activations against what autograd really keeps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import (
    KEEP_ALL_ACTIVATIONS,
    ActivationMemoryConfig,
    ParallelConfig,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model import memory_estimate as memory
from areal_hpc.trainer.model.families.architecture import Architecture, MoeConfig
from areal_hpc.trainer.model.policy import build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.step import make_micro_batches_of_this_rank, run_forward_backward
from tests.support.replay_worker import Scenario

TOKENS = 512
# As many key-value heads as heads: without FlashAttention grouped heads are copied.
DENSE = Architecture("qwen2", 1, 256, 8, 8, 32, 768, 512, 1e-6, 1e4, None, tied=True)
MIXTURE = replace(DENSE, family="qwen3_moe", experts=MoeConfig(4, 2, 192, norm_weights=True))


def count_kept(
    arch: Architecture, activations: ActivationMemoryConfig = KEEP_ALL_ACTIVATIONS
) -> int:
    """Float32 numbers that autograd holds between forward and backward, weights apart."""
    policy = build_policy(arch, ParallelConfig(), torch.float32, torch.device("cpu"), activations)
    for parameter in policy.gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.gpt.parameters()}
    mask = np.zeros(TOKENS, np.uint8)
    mask[-1] = 1
    row = TrainingRow(np.arange(TOKENS, dtype=np.int32) % arch.vocab, mask, {})
    held: dict[int, torch.Tensor] = {}
    kept_bytes = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor  # kept, so addresses stay taken
        return tensor

    def end_forward(_: object, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        nonlocal kept_bytes
        # What is recomputed is saved anew in the backward pass; what is discarded has size 0 now.
        kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
        return logprobs_N.sum(), LossStats()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        batches = make_micro_batches_of_this_rank(policy, [row], [], TOKENS)
        run_forward_backward(policy, batches, end_forward, backward=True)
    return kept_bytes // 4


@pytest.mark.on_ranks(1)
def test_a_layer_keeps_as_much_as_is_estimated(scenario: Scenario, paths: RunPaths) -> None:
    for arch in (DENSE, replace(DENSE, family="qwen3"), MIXTURE):
        measured = (count_kept(replace(arch, layers=3)) - count_kept(arch)) // 2
        estimated = memory.count_layer_activation_values(arch, ParallelConfig(), TOKENS)
        assert measured == pytest.approx(estimated, rel=0.04), arch.family
