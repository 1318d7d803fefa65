"""Orders to the self-tests and what they report, as files. No torch: who asks need not have it.

Paths are texts, as they are in the files.
"""

from typing import Literal

from msgspec import Struct

COLLECTIVES_MODULE = "areal_hpc.trainer.self_test.collective_rates"
STEP_MODULE = "areal_hpc.trainer.self_test.step_comparison_with_transformers"
ENGINE_MODULE = "areal_hpc.trainer.self_test.engine_comparison"
"""Modules for `python -m`; each takes the path of its order."""

Device = Literal["cpu", "cuda"]
DTypeName = Literal["float32", "bfloat16"]


class CollectivesRequest(Struct, frozen=True):
    """To each rank: take part in all-reduces and in a ring of messages."""

    device: Device
    size_bytes: int
    """Of each rank's tensor."""
    rounds: int
    """Rounds that count."""
    rendezvous_dir: str
    report: str
    """Written by rank 0."""


class CollectiveRates(Struct, frozen=True, tag=True):
    """Rates of collectives between ranks, by the slowest of them."""

    ranks: int
    backend: str
    size_bytes: int
    all_reduce_bytes_per_s: float
    """Bus bandwidth, as NCCL's tests count it: 2 (n - 1) / n times the bytes, over the time."""
    ring_bytes_per_s: float
    """What each rank sends to its neighbor while it receives as much from the other one."""
    wrong_elements: int
    """Elements of results, over all ranks, that are not what they must be."""


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


class StepComparison(Struct, frozen=True, tag=True):
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


class EngineComparisonRequest(Struct, frozen=True):
    """Compare a running cell's replica with the trainer, before and after an update of weights."""

    device: Device
    dtype: DTypeName
    model_dir: str
    """The model that the replica serves."""
    run_dir: str
    """Of the cell."""
    transport: Literal["broadcast", "disk"]
    context_tokens: int
    start_timeout_s: float
    report: str


class EngineComparison(Struct, frozen=True, tag=True):
    """A replica beside the trainer."""

    dtype: DTypeName
    transport: Literal["broadcast", "disk"]
    start_s: float
    """Until the replica was ready, from when it was asked for the first time."""
    tokens: int
    """Sampled tokens of each of the two comparisons."""
    mean_gap: float
    """Mean absolute difference of a sampled token's log-probability, with the starting weights."""
    max_gap: float
    updated_mean_gap: float
    """The same after the update, with the trainer's new weights."""
    updated_max_gap: float
    change: float
    """By how much the step changed log-probabilities, on average: what a missed update would show
    as a gap."""
    sent_bytes: int
    update_s: dict[str, float]
    """Phases of the update; `verify` compared the checksum of every parameter."""
    update_error: str
    """Why the replica does not have the new weights; empty if it does, checksum and all."""
