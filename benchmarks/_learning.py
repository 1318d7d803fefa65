"""A random model in two forms, Hugging Face's and the trainer's, and batches for both."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from areal_hpc.jobs.node import get_task_position
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.sections.trainer import AdamConfig, ParallelConfig
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.model.families.architecture import parse_architecture
from areal_hpc.trainer.model.hf_weights import load_hf
from areal_hpc.trainer.model.policy import TrainedNetwork, build_policy
from areal_hpc.trainer.objective.loss_stats import LossStats, Number
from areal_hpc.trainer.objective.policy_loss import compute_policy_loss
from areal_hpc.trainer.optimizer import build_optimizer
from areal_hpc.trainer.process_groups import join_process_groups
from areal_hpc.trainer.step import (
    MicroBatch,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    train_step,
)

RATE = 1e-6
NO_TARGET = -100
"""The label that Hugging Face's loss passes over."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A dense decoder with tied embeddings."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each matrix product of a layer, as the trainer fuses them."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, query + 2 * key),
            "proj": (query, self.hidden),
            "fc1": (self.hidden, 2 * self.ffn),
            "fc2": (self.ffn, self.hidden),
        }

    @property
    def parameters(self) -> int:
        """Weights of matrix products; norms and biases left out."""
        layer = sum(inputs * outputs for inputs, outputs in self.layer_shapes.values())
        return self.layers * layer + self.hidden * self.vocab

    def step_flops(self, lengths: Sequence[int], scored: int) -> float:
        """Compute the work of a forward and a backward pass: products with weights, attention."""
        head = self.hidden * self.vocab
        linear = 6.0 * ((self.parameters - head) * sum(lengths) + head * scored)
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return linear + 12.0 * self.layers * self.heads * self.head_dim * pairs


QWEN_HALF_BILLION = Sizes(
    "qwen2", hidden=896, layers=24, heads=14, kv_heads=2, ffn=4864, vocab=151936
)
"""Sizes of Qwen2.5-0.5B."""


def make_hf_model(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """The model as transformers builds it, in training mode."""
    kinds = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    config = kinds[sizes.family](
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        intermediate_size=sizes.ffn,
        vocab_size=sizes.vocab,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **({"head_dim": sizes.head_dim} if sizes.family == "qwen3" else {}),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(device=device, dtype=dtype).train()


def make_row(
    generator: np.random.Generator, length: int, vocab: int, scored_share: float
) -> TrainingRow:
    """Random tokens, of which the last `scored_share` are learnt from."""
    mask_T = np.zeros(length, dtype=np.uint8)
    mask_T[length - round(length * scored_share) :] = 1
    return TrainingRow(
        generator.integers(0, vocab, length).astype(np.int32),
        mask_T,
        {
            Channel.ADVANTAGE: np.full(length, generator.normal(), dtype=np.float32),
            # About what a random model says, so that no weight is capped.
            Channel.BEHAVIOR: np.full(length, -np.log(vocab), dtype=np.float32),
        },
    )


class Trainee:
    """Trainer of a comparison: its policy, its optimizer, its step."""

    def __init__(self, hf_model: Any, device: torch.device, dtype: torch.dtype, max_tokens: int):
        arch = parse_architecture(hf_model.config.to_dict(), "benchmark")
        self.policy: TrainedNetwork = build_policy(arch, ParallelConfig(), dtype, device)
        state = hf_model.state_dict()
        load_hf(self.policy, lambda tensor, part: state[tensor.name][part])
        optimizer: Any = build_optimizer(self.policy, AdamConfig(lr=RATE))
        optimizer.reload_model_params()
        self.optimizer = optimizer
        self.max_tokens = max_tokens

    def pack(
        self,
        rows: Sequence[TrainingRow],
        channels: Sequence[str] = (Channel.ADVANTAGE, Channel.BEHAVIOR),
    ) -> list[MicroBatch]:
        return make_micro_batches_of_this_rank(self.policy, rows, channels, self.max_tokens)

    def step(self, rows: Sequence[TrainingRow], rate: float = RATE) -> LossStats:
        """Take one training step: pack, forward, loss, backward, reduce, update."""
        tally, _ = train_step(self.policy, self.optimizer, self.pack(rows), grpo_loss, rate)
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()  # the update is still running
        return tally

    def mean_logprob(self, rows: Sequence[TrainingRow]) -> float:
        """Average log-probabilities over the scored tokens, without a gradient."""
        sums = run_forward_backward(self.policy, self.pack(rows), grpo_loss, backward=False).sums
        return float(sums["logprob"] / sums["tokens"])


def grpo_loss(batch: MicroBatch, logprobs_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    """The learner's loss for a batch that is a single part: the proximal policy is the present."""
    held_N = logprobs_N.detach()
    loss = compute_policy_loss(
        logprobs_N,
        held_N,
        batch.channels_N[Channel.BEHAVIOR],
        batch.channels_N[Channel.ADVANTAGE],
        batch.rows,
        ObjectiveConfig(),
    )
    counts = {"tokens": len(logprobs_N), "padded_tokens": batch.padded_token_count}
    sums: dict[str, Number] = {**loss.sums, **counts, "logprob": held_N.sum()}
    return loss.total, LossStats(sums, {"weight": loss.largest_weight})


def hf_forward_backward(model: Any, rows: Sequence[TrainingRow], rows_per_pass: int) -> float:
    """Plain transformers: rows in their order, padded to the longest of a pass; the mean loss.

    A pass without padding gets no mask, which lets PyTorch choose its causal kernel.
    """
    model.zero_grad(set_to_none=True)
    device, total, tokens = model.device, 0.0, 0
    for first in range(0, len(rows), rows_per_pass):
        part = rows[first : first + rows_per_pass]
        longest = max(len(row.input_ids_T) for row in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, NO_TARGET)
        for index, row in enumerate(part):
            size = len(row.input_ids_T)
            ids[index, :size] = torch.from_numpy(row.input_ids_T).long()
            mask[index, :size] = 1
            labels[index, :size] = ids[index, :size].where(
                torch.from_numpy(row.loss_mask_T) != 0, NO_TARGET
            )
        scored = int((labels[:, 1:] != NO_TARGET).sum())
        loss = model(
            ids.to(device),
            attention_mask=None if mask.all() else mask.to(device),
            labels=labels.to(device),
            use_cache=False,
        ).loss
        loss.backward()
        total, tokens = total + loss.item() * scored, tokens + scored
    return total / tokens


def open_lone_world(device: str) -> torch.device:
    """The trainer's process groups for one rank; its device. Patch Megatron first."""
    with tempfile.TemporaryDirectory() as folder:
        return join_process_groups(
            get_task_position(),
            ParallelConfig(),
            device,  # type: ignore[arg-type]
            Path(folder),
        )


def describe(sizes: Sizes) -> dict[str, Any]:
    """Sizes for a results file."""
    return {**asdict(sizes), "parameters": sizes.parameters}
