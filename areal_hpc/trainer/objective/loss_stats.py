"""Statistics of loss functions, added up on the device and read once per step; their metrics.

They include the mismatch of engine and trainer under equal weights: sums and a histogram of the
differences of log-probabilities over tokens, added up over ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_hpc.trainer.objective.policy_loss import LOSS_SUM_NAMES

Number = float | torch.Tensor
"""A number on the host, or a tensor without axes on a device."""


@dataclass(slots=True, eq=False)
class LossStats:
    """Statistics that loss functions add up over tokens: sums, maxima and histograms by name."""

    sums: Mapping[str, Number] = field(default_factory=dict)
    maxima: Mapping[str, Number] = field(default_factory=dict)
    histograms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Counts by bin in float64."""

    def add(self, added: LossStats) -> None:
        """Add the statistics of another micro-batch, without waiting for the device."""
        self.sums = dict(self.sums) | {
            name: self.sums.get(name, 0.0) + value for name, value in added.sums.items()
        }
        self.maxima = dict(self.maxima) | {
            name: _take_larger(self.maxima.get(name, value), value)
            for name, value in added.maxima.items()
        }
        self.histograms = dict(self.histograms) | {
            name: counts + self.histograms.get(name, 0) for name, counts in added.histograms.items()
        }

    def reduce_over_ranks(
        self,
        names: Sequence[str],
        maxima: Sequence[str],
        histograms: Mapping[str, int] | None = None,
    ) -> ReducedStats:
        """Reduce these statistics over all ranks, for every rank. A collective; reads the device.

        `histograms` gives the number of bins of each. Only the first tensor-parallel rank of the
        last stage contributes: the others processed the same tokens, or none.
        """
        contributes = (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        contributed = self if contributes else LossStats()
        bins_of = histograms or {}
        numbers = [contributed.sums.get(name, 0.0) for name in names]
        numbers += [contributed.maxima.get(name, 0.0) for name in maxima]
        vectors = [
            contributed.histograms.get(name, torch.zeros(bins, dtype=torch.float64))
            for name, bins in bins_of.items()
        ]
        sizes = [len(names), len(maxima), *bins_of.values()]
        sums, tops, *counts_of = copy_numbers_to_host(numbers, vectors).split(sizes)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            # A maximum over ranks ignores values that are not numbers: a flag represents them.
            is_nan = tops.isnan()
            with_flags = torch.stack([tops.nan_to_num(0.0, torch.inf, -torch.inf), is_nan.double()])
            dist.all_reduce(with_flags, op=dist.ReduceOp.MAX)
            tops = with_flags[0].masked_fill(with_flags[1] > 0, torch.nan)
            for counts_B in counts_of:
                dist.all_reduce(counts_B)
        return ReducedStats(
            dict(zip(names, sums.tolist(), strict=True)),
            dict(zip(maxima, tops.tolist(), strict=True)),
            dict(zip(bins_of, counts_of, strict=True)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReducedStats:
    sums: dict[str, float]
    maxima: dict[str, float]
    histograms: dict[str, torch.Tensor]


def _take_larger(current: Number, value: Number) -> Number:
    pair = (current, value)
    device = next((number.device for number in pair if isinstance(number, torch.Tensor)), None)
    if device is not None:
        first, second = (torch.as_tensor(n, dtype=torch.float64, device=device) for n in pair)
        return torch.maximum(first, second)
    return value if math.isnan(value) else max(current, value)


def copy_numbers_to_host(
    numbers: Sequence[Number], vectors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Copy numbers, then vectors, into one float64 tensor on the host: one copy from a device."""
    on_host = [0.0 if isinstance(number, torch.Tensor) else number for number in numbers]
    result = torch.tensor(on_host, dtype=torch.float64)
    tensors = {index: n for index, n in enumerate(numbers) if isinstance(n, torch.Tensor)}
    parts = [n.double().reshape(1) for n in tensors.values()] + [v.double() for v in vectors]
    if not parts:
        return result
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    read = torch.cat([part.to(device, non_blocking=True) for part in parts]).cpu()
    result[list(tensors)] = read[: len(tensors)]
    return torch.cat([result, read[len(tensors) :]])


BINS_PER_DECADE = 32
"""Resolution of percentiles: half a bin is 4 %."""
MIN_EXPONENT, MAX_EXPONENT = -9, 3
"""Powers of ten that the histogram covers; values beyond are counted in its outermost bins."""
BIN_COUNT = (MAX_EXPONENT - MIN_EXPONENT) * BINS_PER_DECADE

MISMATCH_SUM_NAMES = ("compared", "mismatch_abs", "mismatch_kl")
"""Sums over compared tokens: their number, the absolute difference, and the k3 estimate of
KL(engine || trainer)."""


def measure_engine_mismatch(
    trainer_N: torch.Tensor, engine_N: torch.Tensor, is_compared_N: torch.Tensor
) -> LossStats:
    """Compare log-probabilities of the tokens that the trainer's current weights sampled.

    Sums are `MISMATCH_SUM_NAMES`; `mismatch` is the largest difference, 0 without tokens, and a
    histogram of tokens by the logarithm of their difference. The mask selects no elements: their
    number would have to be read from the device.
    """
    log_ratio_N = torch.where(is_compared_N, trainer_N - engine_N, 0.0).double()
    diff_N = log_ratio_N.abs()
    counted_N = is_compared_N.double()
    kl = (torch.expm1(log_ratio_N) - log_ratio_N).sum()
    sums = dict(zip(MISMATCH_SUM_NAMES, (counted_N.sum(), diff_N.sum(), kl), strict=True))
    largest = diff_N.max() if diff_N.numel() else diff_N.new_zeros(())
    raw_bins_N = (diff_N.clamp(min=10.0**MIN_EXPONENT).log10() - MIN_EXPONENT) * BINS_PER_DECADE
    # Values that are not numbers go to the last bin; the mean and the maximum reveal them.
    bins_N = raw_bins_N.nan_to_num(BIN_COUNT - 1, BIN_COUNT - 1).long().clamp_(0, BIN_COUNT - 1)
    # Whole numbers: their sum does not depend on the order.
    histogram_B = diff_N.new_zeros(BIN_COUNT).index_add_(0, bins_N, counted_N)
    return LossStats(sums, {"mismatch": largest}, {"mismatch": histogram_B})


def estimate_abs_diff_percentile(
    log10_histogram_B: torch.Tensor, share: float, max_diff: float
) -> float:
    """Return the difference that `share` of the tokens do not exceed, at most `max_diff`; or 0."""
    total = float(log10_histogram_B.sum())
    if not total or math.isnan(max_diff):
        return max_diff
    index = int(torch.searchsorted(log10_histogram_B.cumsum(0), share * total))
    middle = float(10.0 ** (MIN_EXPONENT + (index + 0.5) / BINS_PER_DECADE))
    return min(middle, max_diff)


STEP_SUM_NAMES = (
    *(*LOSS_SUM_NAMES, *MISMATCH_SUM_NAMES),
    *("entropy", "tokens", "padded_tokens", "followed", "rerouted", "observation_loss"),
)
STEP_MAXIMUM_NAMES = ("weight", "mismatch")
STEP_HISTOGRAM_BINS = {"mismatch": BIN_COUNT}


def build_loss_metrics(
    sums: Mapping[str, float], maxima: Mapping[str, float], histograms: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Build the metrics of policy, weights and engine from a batch's passes on all ranks."""
    tokens, compared = max(1.0, sums["tokens"]), max(1.0, sums["compared"])
    largest = maxima["mismatch"]
    squares = sums["applied_squared"] * sums["tokens"]
    followed, observed = sums["followed"], sums["observation_loss"]
    return {
        **({"observation/loss": observed / tokens} if observed else {}),
        **({"experts/rerouted_fraction": sums["rerouted"] / followed} if followed else {}),
        "loss": sums["loss"] / tokens,
        "entropy/mean": sums["entropy"] / tokens,
        "ratio/clip_fraction": sums["clipped"] / tokens,
        "importance_weight/mean": sums["weight"] / tokens,
        "importance_weight/max": maxima["weight"],
        "importance_weight/out_of_bounds_fraction": sums["outside"] / tokens,
        "importance_weight/effective_sample_fraction": (
            sums["applied"] ** 2 / squares if squares else 0.0
        ),
        "kl/behavior": sums["kl"] / tokens,
        "logprob/engine_trainer_max_abs_diff": largest,
        "logprob/engine_trainer_mean_abs_diff": sums["mismatch_abs"] / compared,
        "logprob/engine_trainer_p99_abs_diff": estimate_abs_diff_percentile(
            histograms["mismatch"], 0.99, largest
        ),
        "logprob/engine_trainer_kl": sums["mismatch_kl"] / compared,
        "logprob/compared_tokens": int(sums["compared"]),
    }
