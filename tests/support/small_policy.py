"""A small model that is opened on a lone rank, scored, and trained for a step."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from areal_hpc.jobs.node import TaskPosition
from areal_hpc.recipe.sections.trainer import AdamConfig, ParallelConfig
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf
from areal_hpc.trainer.model.policy import TrainedNetwork, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.optimizer import build_optimizer
from areal_hpc.trainer.process_groups import join_process_groups
from areal_hpc.trainer.step import (
    MicroBatch,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    train_step,
)

Device = Literal["cpu", "cuda"]
MAX_TOKENS = 512
"""Token limit of one micro-batch: a few rows."""


def init_single_rank_groups(device: Device) -> torch.device:
    """The trainer's process groups with this process alone in them; its device."""
    megatron_cpu.patch_torch_megatron_without_gpu()
    with tempfile.TemporaryDirectory() as folder:
        return join_process_groups(TaskPosition(0, 1, 0, 0), ParallelConfig(), device, Path(folder))


def load_policy(model_dir: Path, device: torch.device) -> TrainedNetwork:
    """The model of a directory, in float32, on a lone rank."""
    arch = read_architecture(model_dir)
    policy = build_policy(arch, ParallelConfig(), torch.float32, device)
    load_hf(policy, HfModelReader(model_dir).read_tensor)
    return policy


def make_training_row(
    input_ids: Sequence[int], scored_from: int, channels: Mapping[str, Sequence[float] | float]
) -> TrainingRow:
    """Make a row whose tokens from a position on are scored; a channel is one number everywhere."""
    mask_T = np.zeros(len(input_ids), dtype=np.uint8)
    mask_T[scored_from:] = 1
    filled = {
        name: np.broadcast_to(np.array(values, dtype=np.float32), len(input_ids)).copy()
        for name, values in channels.items()
    }
    return TrainingRow(np.array(input_ids, dtype=np.int32), mask_T, filled)


def list_scored_logprobs(policy: TrainedNetwork, row: TrainingRow) -> list[float]:
    """Log-probabilities of the row's scored tokens, in order. For a lone rank."""
    logprobs: list[float] = []

    def note(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        logprobs.extend(logprobs_N.tolist())
        return logprobs_N.sum(), LossStats()

    batches = make_micro_batches_of_this_rank(
        policy, [row], (), max(MAX_TOKENS, len(row.input_ids_T))
    )
    run_forward_backward(policy, batches, note, backward=False)
    return logprobs


def compute_loss(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    return -(logprobs_N * batch.channels_N[Channel.ADVANTAGE]).sum(), LossStats()


def take_step_with_fresh_adamw(policy: TrainedNetwork, row: TrainingRow, rate: float) -> None:
    optimizer: Any = build_optimizer(policy, AdamConfig(lr=rate, weight_decay=0.0))
    optimizer.reload_model_params()
    batches = make_micro_batches_of_this_rank(policy, [row], [*row.channels], MAX_TOKENS)
    train_step(policy, optimizer, batches, compute_loss, rate)
