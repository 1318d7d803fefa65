"""A step of a small model beside transformers in float32 on the CPU.

Run once per rank of a layout. Every rank has the same rows, and computes the same reference.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import transformers
from msgspec import Struct

from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.trainer.batch.training_rows import ADVANTAGE_CHANNEL
from areal_hpc.trainer.memory import read_peak_memory_bytes
from areal_hpc.trainer.model.policy import TrainedNetwork
from areal_hpc.trainer.objective.loss_stats import LossStats, ReducedStats
from areal_hpc.trainer.process_groups import destroy_process_groups
from areal_hpc.trainer.step import MicroBatch, run_forward_backward
from tests.support.small_policy import (
    Device,
    DTypeName,
    compute_loss,
    join_ranks,
    load_policy,
    make_training_row,
    pack_into_micro_batches,
    take_step_with_fresh_adamw,
)

LEARNING_RATE = 1e-4
MAX_EXACT_GAP = 1e-4
"""Float32 on two devices: sums in another order."""
ROUNDING_MARGIN = 2.0
"""In 16 bits the trainer may be so many times as far from float32 as transformers is."""
EXPECTED_LOGPROBS_CHANNEL = "expected"
"""What transformers makes of a token."""
ROWS, MAX_ROW_TOKENS, SEED = 12, 160, 5
MIN_TOKEN_ID = 3
"""Smallest token: the padding token, 0 in tiny models, has no gradient as an input there."""


class StepRequest(Struct, frozen=True):
    """To each rank: train one step of a model, which is compared with transformers on the CPU."""

    device: Device
    dtype: DTypeName
    model_dir: str
    rendezvous_dir: str
    report: str
    """Written by rank 0."""
    parallel: dict[str, int] = {}
    """Sizes of `trainer.parallel`; one rank unless any are given."""


class StepComparison(Struct, frozen=True):
    """A step of the trainer beside transformers in float32 on the CPU.

    `reference_*` are the same distances of transformers in the trainer's dtype, on the CPU.
    """

    dtype: DTypeName
    tokens: int
    logprob_gap: float
    """Largest difference of a log-probability."""
    reference_logprob_gap: float
    gradient_norm_gap: float
    """Relative difference of the gradient's norm."""
    reference_gradient_norm_gap: float
    rise: float
    """By how much the step raised the mean log-probability of what was rewarded, over the rest."""
    peak_bytes: int

    def assert_off_by_rounding(self) -> None:
        """Only rounding parts the step from float32, and what was rewarded became likelier."""
        gap, norm_gap = self.reference_logprob_gap, self.reference_gradient_norm_gap
        assert self.logprob_gap <= max(MAX_EXACT_GAP, ROUNDING_MARGIN * gap), self
        assert self.gradient_norm_gap <= max(MAX_EXACT_GAP, ROUNDING_MARGIN * norm_gap), self
        assert self.rise > 0, self


class TransformersLogprobsAndGradient:
    """Log-probabilities and the gradient's norm, as transformers has them on the CPU.

    To be made before the process groups: transformers 5.19, first used in a process that has them,
    leaves the rotary frequencies of a model that it loads as they lay in memory.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True
        ).to(dtype)
        rows = make_sequences_with_advantages(model.config.vocab_size)
        tokens = sum(len(ids) - 1 for ids, _ in rows)
        self.logprobs: list[list[float]] = []
        """Of every token but a row's first."""
        for ids, advantage in rows:
            logprobs_T = _score_by_transformers(model, ids)
            (-logprobs_T.sum() * advantage / tokens).backward()
            self.logprobs.append(logprobs_T.tolist())
        squares = sum(
            float(parameter.grad.double().square().sum())
            for parameter in model.parameters()
            if parameter.grad is not None
        )
        self.gradient_norm = squares**0.5


def make_sequences_with_advantages(vocab: int) -> list[tuple[list[int], float]]:
    """Random tokens of several lengths with an advantage, every other one rewarded."""
    generator = np.random.default_rng(SEED)
    lengths = generator.integers(5, MAX_ROW_TOKENS, size=ROWS)
    return [
        (generator.integers(MIN_TOKEN_ID, vocab, length).tolist(), 1.0 if number % 2 else -1.0)
        for number, length in enumerate(lengths)
    ]


def _score_by_transformers(model: Any, ids: Sequence[int]) -> torch.Tensor:
    ids_T = torch.tensor(ids)
    logits: torch.Tensor = model(ids_T[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]


def find_largest_gap(
    measured: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]
) -> float:
    """Largest difference between numbers at the same place."""
    return max(
        abs(one - other)
        for ones, others in zip(measured, expected, strict=True)
        for one, other in zip(ones, others, strict=True)
    )


def compute_loss_and_gap(
    batch: MicroBatch, logprobs_N: torch.Tensor
) -> tuple[torch.Tensor, LossStats]:
    """The loss of a step, how far its log-probabilities are from those expected, and their sums."""
    total, _ = compute_loss(batch, logprobs_N)
    held_N, advantages_N = logprobs_N.detach(), batch.channels_N[ADVANTAGE_CHANNEL]
    gaps_N = (held_N - batch.channels_N[EXPECTED_LOGPROBS_CHANNEL]).abs()
    sums: dict[str, float | torch.Tensor] = {
        "tokens": len(held_N),
        "rewarded": (advantages_N > 0).sum(),
        "rewarded_logprob": held_N[advantages_N > 0].sum(),
        "other_logprob": held_N[advantages_N <= 0].sum(),
    }
    return total, LossStats(sums, {"gap": gaps_N.max() if len(gaps_N) else 0.0})


def take_and_compare_step(
    policy: TrainedNetwork,
    exact_reference: TransformersLogprobsAndGradient,
    rounded_reference: TransformersLogprobsAndGradient,
) -> StepComparison:
    """A step, what the policy makes of the rows before and after it, and transformers.

    A collective over all ranks.
    """
    rows = [
        make_training_row(
            ids, 1, {ADVANTAGE_CHANNEL: advantage, EXPECTED_LOGPROBS_CHANNEL: [0.0, *expected]}
        )
        for (ids, advantage), expected in zip(
            make_sequences_with_advantages(policy.arch.vocab), exact_reference.logprobs, strict=True
        )
    ]
    stats, norm = take_step_with_fresh_adamw(policy, rows, LEARNING_RATE, compute_loss_and_gap)
    before = _reduce_stats_over_ranks(stats)
    after = _reduce_stats_over_ranks(
        run_forward_backward(
            policy, pack_into_micro_batches(policy, rows), compute_loss_and_gap, backward=False
        )
    )
    return StepComparison(
        dtype="float32" if policy.dtype == torch.float32 else "bfloat16",
        tokens=round(before.sums["tokens"]),
        logprob_gap=before.maxima["gap"],
        reference_logprob_gap=find_largest_gap(
            rounded_reference.logprobs, exact_reference.logprobs
        ),
        gradient_norm_gap=abs(norm / exact_reference.gradient_norm - 1),
        reference_gradient_norm_gap=abs(
            rounded_reference.gradient_norm / exact_reference.gradient_norm - 1
        ),
        rise=_compute_rewarded_minus_other_logprob(after)
        - _compute_rewarded_minus_other_logprob(before),
        peak_bytes=read_peak_memory_bytes(policy.device),
    )


def _reduce_stats_over_ranks(stats: LossStats) -> ReducedStats:
    names = ("tokens", "rewarded", "rewarded_logprob", "other_logprob")
    return stats.reduce_over_ranks(names, ("gap",))


def _compute_rewarded_minus_other_logprob(stats: ReducedStats) -> float:
    sums = stats.sums
    others = sums["tokens"] - sums["rewarded"]
    return sums["rewarded_logprob"] / sums["rewarded"] - sums["other_logprob"] / others


def main() -> None:
    """Compare as ordered, as the rank that the environment names."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=StepRequest)
    model_dir, dtype = Path(order.model_dir), getattr(torch, order.dtype)
    exact = TransformersLogprobsAndGradient(model_dir, torch.float32)
    rounded = (
        exact if order.dtype == "float32" else TransformersLogprobsAndGradient(model_dir, dtype)
    )
    parallel = ParallelConfig.model_validate(order.parallel)
    device = join_ranks(order.device, parallel, Path(order.rendezvous_dir))
    policy = load_policy(model_dir, order.dtype, device, parallel)
    comparison = take_and_compare_step(policy, exact, rounded)
    if dist.get_rank() == 0:
        write_atomic(Path(order.report), msgspec.json.encode(comparison))
    destroy_process_groups()


if __name__ == "__main__":
    main()
