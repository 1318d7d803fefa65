"""Proof of new weights: replica and trainer score one fixed prompt and must agree.

A wrong bucket changes what nearly every token is worth. What rounding hides, such as low mantissa
bits, and rows of the embedding whose tokens are not in the prompt, such a proof cannot see.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets import TensorSpec

PROBE_TOKENS = 100
MAX_GAP_BY_DTYPE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""Default of `weights.max_probe_gap`, by what is sent. Under the same weights 2e-6 (float32) and
0.04 (bfloat16) were measured on CPUs, over up to 28 layers; GPUs may round float32 to TF32."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt and the trainer's log-probabilities of its tokens, but for the first."""

    input_ids: list[int]
    logprobs: list[float]


def choose_probe_ids(vocab: int) -> list[int]:
    """Choose a prompt from the middle of a vocabulary: special tokens are at its ends."""
    middle = range(vocab // 10, max(vocab // 10 + 1, vocab * 8 // 10))
    return random.Random(0).choices(middle, k=PROBE_TOKENS)


def get_max_probe_gap(config: WeightsConfig, specs: Sequence[TensorSpec]) -> float:
    """Return the bound for weights that are sent in these types."""
    if config.max_probe_gap is not None:
        return config.max_probe_gap
    return max(MAX_GAP_BY_DTYPE[spec.dtype] for spec in specs)


def check_probe(
    probe: Probe, replica_logprobs: Sequence[float], max_gap: float, replica: object
) -> None:
    """Compare a replica's log-probabilities with the trainer's, as far as the replica scored.

    Raises:
        WeightSyncError: They differ by more than `max_gap` on average, or are no numbers.
    """
    scored = len(replica_logprobs)
    if not scored:
        raise WeightSyncError(f"{replica}: expected log-probabilities of a prompt, got none")
    gap = float(np.abs(np.subtract(probe.logprobs[:scored], replica_logprobs)).mean())
    if not gap <= max_gap:
        hint = "the weights are sent again"
        if not all(map(math.isfinite, probe.logprobs)):
            hint = "the trainer's own are no numbers: its weights are broken, resume earlier"
        raise WeightSyncError(
            f"{replica}: log-probabilities of {scored} tokens differ from the trainer's by "
            f"{gap:.2g} on average, at most {max_gap:g} is rounding",
            key="weights.max_probe_gap",
            hint=hint,
        )
