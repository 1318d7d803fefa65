"""Metrics of a step from what its passes added up over tokens, and the log-probability drift check.

The check says how far engine and trainer are apart under the same weights. Differences are sums and
a histogram over tokens, which ranks and micro-batches add up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from areal_hpc.trainer.objective.policy_loss import LOSS_SUM_NAMES

BINS_PER_DECADE = 32
"""A percentile is read to 4 %: half a bin."""
MIN_EXPONENT, MAX_EXPONENT = -9, 3
"""Powers of ten that the histogram covers; what lies beyond is counted in the last bin there."""
BIN_COUNT = (MAX_EXPONENT - MIN_EXPONENT) * BINS_PER_DECADE

MISMATCH_SUM_NAMES = ("compared", "mismatch_abs", "mismatch_kl")
"""Sums over compared tokens: their number, the absolute difference, and the k3 estimate of
KL(engine || trainer)."""


@dataclass(frozen=True, slots=True)
class EngineMismatch:
    """Differences of the log-probabilities of some tokens, on their device."""

    sums: dict[str, torch.Tensor]
    """`MISMATCH_SUM_NAMES` by name."""
    max_abs_diff: torch.Tensor
    """0 without tokens."""
    histogram_B: torch.Tensor
    """Tokens by the logarithm of their difference, in float64."""


def measure_engine_mismatch(
    trainer_N: torch.Tensor, engine_N: torch.Tensor, is_compared_N: torch.Tensor
) -> EngineMismatch:
    """Compare log-probabilities of tokens, of those that the trainer's weights sampled.

    Nothing is picked out by the mask: how many it picks would have to be read from the device.
    """
    log_ratio_N = torch.where(is_compared_N, trainer_N - engine_N, 0.0).double()
    diff_N = log_ratio_N.abs()
    counted_N = is_compared_N.double()
    kl = (torch.expm1(log_ratio_N) - log_ratio_N).sum()
    sums = dict(zip(MISMATCH_SUM_NAMES, (counted_N.sum(), diff_N.sum(), kl), strict=True))
    largest = diff_N.max() if diff_N.numel() else diff_N.new_zeros(())
    bin_places_N = (diff_N.clamp(min=10.0**MIN_EXPONENT).log10() - MIN_EXPONENT) * BINS_PER_DECADE
    # What is not a number has no place; the mean and the maximum tell of it.
    bins_N = bin_places_N.nan_to_num(BIN_COUNT - 1, BIN_COUNT - 1).long().clamp_(0, BIN_COUNT - 1)
    # Whole numbers: their sum does not depend on the order.
    histogram_B = diff_N.new_zeros(BIN_COUNT).index_add_(0, bins_N, counted_N)
    return EngineMismatch(sums, largest, histogram_B)


def estimate_abs_diff_percentile(
    log10_histogram_B: torch.Tensor, share: float, max_diff: float
) -> float:
    """The difference that `share` of the tokens do not exceed; at most `max_diff`, 0 for none."""
    total = float(log10_histogram_B.sum())
    if not total or math.isnan(max_diff):
        return max_diff
    index = int(torch.searchsorted(log10_histogram_B.cumsum(0), share * total))
    middle = float(10.0 ** (MIN_EXPONENT + (index + 0.5) / BINS_PER_DECADE))
    return min(middle, max_diff)


STEP_SUM_NAMES = (*LOSS_SUM_NAMES, *MISMATCH_SUM_NAMES, "entropy", "tokens", "places")
STEP_MAXIMUM_NAMES = ("weight", "mismatch")
STEP_HISTOGRAM_BINS = {"mismatch": BIN_COUNT}


def build_loss_metrics(
    sums: Mapping[str, float], maxima: Mapping[str, float], histograms: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """What a batch's passes say of policy, weights and engine, over all ranks."""
    tokens, compared = max(1.0, sums["tokens"]), max(1.0, sums["compared"])
    largest = maxima["mismatch"]
    squares = sums["applied_squared"] * sums["tokens"]
    return {
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
