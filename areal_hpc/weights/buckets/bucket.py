"""Buckets in memory: filling, messages, unpacking.

The format of a packed bucket is SGLang's `flattened_bucket`
(sglang/srt/weight_sync/tensor_bucket.py): one uint8 vector, tensors end to end. Of a bucket in
place every tensor is a message of its own. Names, dtypes and shapes travel beside both as JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.buckets.plan import BucketPlan, TensorSlot


class OpenBucket(ABC):
    """A bucket being filled: place every parameter, then send its `messages`."""

    packed: ClassVar[bool]
    """All of it is one message; else every parameter is one."""

    def __init__(self, bucket: BucketPlan) -> None:
        self.bucket = bucket
        self._missing = {slot.spec.name: slot for slot in bucket.slots}

    @property
    def is_full(self) -> bool:
        """True when every parameter has been placed."""
        return not self._missing

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """Put one parameter in its place.

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
        self._put(slot, tensor.detach())

    @abstractmethod
    def _put(self, slot: TensorSlot, tensor: torch.Tensor) -> None:
        """Take in a parameter that belongs in `slot`."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name, once it is full."""

    @property
    @abstractmethod
    def messages(self) -> Sequence[torch.Tensor]:
        """What crosses a group, one broadcast each, once it is full."""


class PackedBucket(OpenBucket):
    """Parameters are copied end to end into one vector, which is one message.

    Args:
        flat: uint8, `bucket.size_bytes` long.
    """

    packed = True

    def __init__(self, bucket: BucketPlan, flat: torch.Tensor) -> None:
        super().__init__(bucket)
        self.flat = flat

    def _put(self, slot: TensorSlot, tensor: torch.Tensor) -> None:
        view_tensor(self.flat, slot).copy_(tensor)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name, as views of the vector."""
        return unpack_bucket(self.bucket, self.flat)

    @property
    def messages(self) -> Sequence[torch.Tensor]:
        """The vector."""
        return [self.flat]


class InPlaceBucket(OpenBucket):
    """Parameters stay where they are, and each is a message; they must not change until sent."""

    packed = False

    def __init__(self, bucket: BucketPlan) -> None:
        super().__init__(bucket)
        self._placed: dict[str, torch.Tensor] = {}

    def _put(self, slot: TensorSlot, tensor: torch.Tensor) -> None:
        self._placed[slot.spec.name] = tensor.contiguous()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name."""
        return self._placed

    @property
    def messages(self) -> Sequence[torch.Tensor]:
        """The parameters, in the order in which the bucket names them."""
        return [self._placed[slot.spec.name] for slot in self.bucket.slots]


class PackingBuffers:
    """Two byte vectors that buckets are packed into in turn, kept from one update to the next."""

    def __init__(self, device: torch.device) -> None:
        self._flats = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def open(self, bucket: BucketPlan) -> PackedBucket:
        """Start packing; the bucket opened before the last one is overwritten."""
        free, last = self._flats
        if free.numel() < bucket.size_bytes:
            free = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=free.device)
        self._flats = [last, free]
        return PackedBucket(bucket, free[: bucket.size_bytes])


def view_tensor(flat: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """One parameter of a packed bucket, without a copy."""
    spec = slot.spec
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return flat[slot.offset : slot.offset + spec.size_bytes].view(dtype).view(spec.shape)


def unpack_bucket(bucket: BucketPlan, flat: torch.Tensor) -> dict[str, torch.Tensor]:
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
    return {slot.spec.name: view_tensor(flat, slot) for slot in bucket.slots}
