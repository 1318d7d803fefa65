"""Pipelined filling and sending of buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.buckets.bucket import OpenBucket
from areal_hpc.weights.buckets.plan import BucketPlan

BucketT = TypeVar("BucketT", bound=OpenBucket)
WaitSent = Callable[[], object]
SendBucket = Callable[[BucketT], WaitSent]
"""Begins to send a full bucket; the bucket stays as it is until the `Wait` has returned."""


def send_all(
    buckets: Sequence[BucketPlan],
    arrivals: Iterator[tuple[str, torch.Tensor]],
    open_bucket: Callable[[BucketPlan], BucketT],
    ship: SendBucket[BucketT],
    watch: Callable[[BucketT], None] = lambda full: None,
) -> None:
    """Fill and send all buckets; never holds more than two, whatever the model's size.

    Args:
        buckets: As planned.
        arrivals: Every parameter of the buckets, in the order in which they were planned.
        open_bucket: Makes a bucket to be filled; the last one may still be on its way.
        ship: Called when the bucket before has arrived.
        watch: Sees each bucket while it is on its way.

    Raises:
        WeightSyncError: The parameters are not those of the buckets.
    """
    arrived: WaitSent = _at_once
    for bucket in buckets:
        filling = open_bucket(bucket)
        _fill(filling, arrivals)
        arrived()
        arrived = ship(filling)
        watch(filling)
    arrived()
    if (extra := next(arrivals, None)) is not None:
        raise WeightSyncError(f"expected no parameter after the last spec, got {extra[0]}")


def _at_once() -> None:
    """Nothing is on its way."""


def _fill(filling: OpenBucket, arrivals: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Place arriving parameters until the bucket is full."""
    while not filling.is_full:
        arrival = next(arrivals, None)
        if arrival is None:
            raise WeightSyncError("the parameters ended before their specs did")
        filling.place(*arrival)
