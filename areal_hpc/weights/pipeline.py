"""Packing one bucket while the one before it is on its way: two buffers, used in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.bucket import BucketBuffer, PackedBucket, largest_bytes
from areal_hpc.weights.plan import Bucket

Wait = Callable[[], object]
Ship = Callable[[PackedBucket], Wait]
"""Begins to send a full bucket; the bucket stays as it is until the `Wait` has returned."""


class Pipeline:
    """Gathers and packs parameters; never holds more than two buckets, whatever the model's size.

    Args:
        device: Where buckets are packed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: tuple[BucketBuffer, BucketBuffer] | None = None
        self._capacity_bytes = 0

    def run(
        self,
        buckets: Sequence[Bucket],
        arrivals: Iterator[tuple[str, torch.Tensor]],
        ship: Ship,
        watch: Callable[[PackedBucket], None] = lambda packed: None,
    ) -> None:
        """Send all buckets.

        Args:
            buckets: As planned.
            arrivals: Every parameter of the buckets, in the order in which they were planned.
            ship: Called when the bucket before has arrived.
            watch: Sees each bucket while it is on its way.

        Raises:
            WeightSyncError: The parameters are not those of the buckets.
        """
        buffers = self._buffers_for(buckets)
        arrived: Wait = _at_once
        for number, bucket in enumerate(buckets):
            packed = buffers[number % 2].open(bucket)
            _fill(packed, arrivals)
            arrived()
            arrived = ship(packed)
            watch(packed)
        arrived()
        if (extra := next(arrivals, None)) is not None:
            raise WeightSyncError(f"expected no parameter after the last spec, got {extra[0]}")

    def _buffers_for(self, buckets: Sequence[Bucket]) -> tuple[BucketBuffer, BucketBuffer]:
        """Kept between updates."""
        needed_bytes = largest_bytes(buckets)
        if self._buffers is None or needed_bytes > self._capacity_bytes:
            self._capacity_bytes = needed_bytes
            self._buffers = (
                BucketBuffer(needed_bytes, self._device),
                BucketBuffer(needed_bytes, self._device),
            )
        return self._buffers


def _at_once() -> None:
    """Nothing is on its way."""


def _fill(packed: PackedBucket, arrivals: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Place arriving parameters until the bucket is full."""
    while not packed.is_full:
        arrival = next(arrivals, None)
        if arrival is None:
            raise WeightSyncError("the parameters ended before their specs did")
        packed.place(*arrival)
