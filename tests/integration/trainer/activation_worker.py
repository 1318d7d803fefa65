"""Prints, per family, the numbers that a layer keeps for its backward pass, and the estimate."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from areal_hpc.jobs.topology import TaskPosition
from areal_hpc.launch import memory
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.model.families.architecture import Architecture, MoeConfig
from areal_hpc.trainer.model.policy import build_policy
from areal_hpc.trainer.process_groups import destroy_process_groups, init_process_groups
from areal_hpc.trainer.step import LossStats, make_micro_batches, run_forward_backward

TOKENS = 512
# As many key-value heads as heads: without FlashAttention grouped heads are copied.
DENSE = Architecture("qwen2", 1, 256, 8, 8, 32, 768, 512, 1e-6, 1e4, None, tied=True)
MIXTURE = replace(DENSE, family="qwen3_moe", experts=MoeConfig(4, 2, 192, norm_weights=True))


def kept(arch: Architecture) -> int:
    """Float32 numbers that autograd holds between forward and backward, weights apart."""
    policy = build_policy(arch, ParallelConfig(), torch.float32, torch.device("cpu"))
    for parameter in policy.gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.gpt.parameters()}
    mask = np.zeros(TOKENS, np.uint8)
    mask[-1] = 1
    row = TrainingRow(np.arange(TOKENS, dtype=np.int32) % arch.vocab, mask, {})
    held: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor  # kept, so addresses stay taken
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        batches = make_micro_batches(policy, [row], [], TOKENS)
        run_forward_backward(
            policy, batches, lambda _, logprobs_N: (logprobs_N.sum(), LossStats()), backward=True
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values()) // 4


def main() -> None:
    parallel = ParallelConfig()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        init_process_groups(TaskPosition(0, 1, 0, 0), parallel, "cpu", Path(folder))
        for arch in (DENSE, replace(DENSE, family="qwen3"), MIXTURE):
            measured = (kept(replace(arch, layers=3)) - kept(arch)) // 2
            found[arch.family] = [measured, memory.count_layer_activations(arch, parallel, TOKENS)]
        destroy_process_groups()
    print(json.dumps(found))


if __name__ == "__main__":
    megatron_cpu.patch_megatron_for_cpu()
    main()
