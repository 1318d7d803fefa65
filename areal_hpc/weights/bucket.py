"""The one codec of a bucket: tensors to bytes and back, for the sender, its checks and tests.

The wire format is SGLang's `flattened_bucket` (sglang/srt/weight_sync/tensor_bucket.py): one
uint8 vector, tensors end to end; names, dtypes and shapes travel beside it as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.plan import Bucket, Slot


class BucketBuffer:
    """A reusable byte vector that buckets are packed into, one after the other."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._flat = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)

    def open(self, bucket: Bucket) -> PackedBucket:
        """Start packing `bucket`, whose parameters may then arrive in any order."""
        return PackedBucket(bucket, self._flat[: bucket.size_bytes])


class PackedBucket:
    """A bucket being filled: place every parameter, then send `flat`."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.bucket = bucket
        self.flat = flat
        """uint8, `bucket.size_bytes` long."""
        self._missing = {slot.spec.name: slot for slot in bucket.slots}

    @property
    def is_full(self) -> bool:
        """True when every parameter has been placed."""
        return not self._missing

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one parameter to its place.

        Raises:
            WeightSyncError: It does not belong here now, or is not what its spec promised.
        """
        slot = self._missing.pop(name, None)
        if slot is None:
            raise WeightSyncError(
                f"expected one of {sorted(self._missing)}, got {name}",
                hint="export parameters in the order of their specs, each once",
            )
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (slot.spec.shape, slot.spec.dtype):
            raise WeightSyncError(
                f"expected {slot.spec.dtype} of shape {slot.spec.shape}, "
                f"got {found[1]} of shape {found[0]}",
                key=name,
            )
        view(self.flat, slot).copy_(tensor.detach())


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """One parameter of a packed bucket, without a copy."""
    spec = slot.spec
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return flat[slot.offset : slot.offset + spec.size_bytes].view(dtype).view(spec.shape)


def unpack(bucket: Bucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every parameter of a packed bucket by name, as views.

    Args:
        bucket: What was packed.
        flat: uint8, `bucket.size_bytes` long.

    Raises:
        WeightSyncError: The vector has another length.
    """
    if flat.numel() != bucket.size_bytes:
        raise WeightSyncError(
            f"expected {bucket.size_bytes} bytes, got {flat.numel()}",
            key=bucket.slots[0].spec.name,
        )
    return {slot.spec.name: view(flat, slot) for slot in bucket.slots}


def largest_bytes(buckets: Sequence[Bucket]) -> int:
    """The capacity one buffer needs for all `buckets`."""
    return max((bucket.size_bytes for bucket in buckets), default=0)
