"""When the buckets of an update are hashed, and that it is the same hash."""

from collections.abc import Iterator

import pytest
import torch

from areal_hpc.weights import digester
from areal_hpc.weights.buckets.bucket import OpenBucket, PackingBuffers
from areal_hpc.weights.buckets.plan import TensorSpec, plan_buckets
from areal_hpc.weights.checksum import compute_non_expert_rank_digests
from areal_hpc.weights.digester import BucketDigester

WEIGHTS = {f"norm.{at}.weight": torch.full((256,), float(at)) for at in range(4)}
BUCKET_BYTES = 1024
"""Of one of them."""


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parameters in the order in which they are hashed."""
    hashed: list[str] = []

    def note(tensors: dict[str, torch.Tensor], rank: int, tp: int, device: str) -> object:
        hashed.extend(tensors)
        return compute_non_expert_rank_digests(tensors, rank, tp, device)

    monkeypatch.setattr(digester, "compute_non_expert_rank_digests", note)
    return hashed


def fill_buckets(*, packed: bool) -> Iterator[OpenBucket]:
    """One after the other: packed ones share two buffers."""
    specs = [TensorSpec(name, (256,), "float32") for name in WEIGHTS]
    buffers = PackingBuffers(torch.device("cpu"))
    for plan in plan_buckets(specs, BUCKET_BYTES):
        bucket = buffers.open_bucket_in_older_buffer(plan) if packed else OpenBucket(plan)
        for slot in plan.slots:
            bucket.copy_or_hold_parameter(slot.spec.name, WEIGHTS[slot.spec.name])
        yield bucket


@pytest.mark.parametrize(
    ("packed", "max_held_bytes", "at_once"),
    [(False, 10 * BUCKET_BYTES, 0), (False, 3 * BUCKET_BYTES, 1), (True, 10 * BUCKET_BYTES, 4)],
)
def test_what_nobody_overwrites_is_hashed_last_as_far_as_memory_allows(
    packed: bool, max_held_bytes: int, at_once: int, hashed: list[str]
) -> None:
    specs = [TensorSpec(name, (256,), "float32") for name in WEIGHTS]
    digests = BucketDigester(plan_buckets(specs, BUCKET_BYTES), {1}, "cpu", max_held_bytes)
    for bucket in fill_buckets(packed=packed):
        digests.add(bucket)
    assert hashed == [*WEIGHTS][:at_once]
    assert digests.finish() == {(1, 0): compute_non_expert_rank_digests(WEIGHTS, 0, 1, "cpu")}
    assert hashed == [*WEIGHTS]
