"""Metrics of a step from what its forward passes added up over tokens. Pure."""

from collections.abc import Mapping

import torch

from areal_hpc.trainer.objective.mismatch_metrics import (
    BIN_COUNT,
    MISMATCH_SUM_NAMES,
    estimate_abs_diff_percentile,
)
from areal_hpc.trainer.objective.policy_loss import LOSS_SUM_NAMES

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
