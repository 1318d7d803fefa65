"""Buckets in memory: filling, messages, pipeline.

The format of a packed bucket is SGLang's `flattened_bucket`
(sglang/srt/weight_sync/tensor_bucket.py): one uint8 vector, tensors end to end. Of a bucket in
place every tensor is a message of its own. Names, dtypes and shapes travel beside both as JSON.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.buckets.plan import BucketPlan


class OpenBucket:
    """A bucket being filled: place every parameter, then send its `tensors_to_send`.

    Parameters are copied end to end into `flat_buffer`, which is one message. Without it they stay
    where they are, each of them a message, and must not change until sent.

    Args:
        bucket: What belongs in it.
        flat_buffer: uint8, `bucket.size_bytes` long.
    """

    def __init__(self, bucket: BucketPlan, flat_buffer: torch.Tensor | None = None) -> None:
        self.bucket = bucket
        self.flat = flat_buffer
        self.tensors: dict[str, torch.Tensor] = {}
        """The parameters by name, once it is full; of a packed bucket views of `flat`."""
        self._missing = {slot.spec.name: slot for slot in bucket.slots}
        if flat_buffer is not None:
            for name, slot in self._missing.items():
                content = flat_buffer[slot.offset_bytes : slot.offset_bytes + slot.spec.size_bytes]
                dtype: torch.dtype = getattr(torch, slot.spec.dtype)
                self.tensors[name] = content.view(dtype).view(slot.spec.shape)

    @property
    def is_full(self) -> bool:
        return not self._missing

    def copy_or_hold_parameter(self, parameter_name: str, tensor: torch.Tensor) -> None:
        """Put one parameter in its place.

        Raises:
            WeightSyncError: It does not belong here now, or is not what its spec promised.
        """
        slot = self._missing.pop(parameter_name, None)
        if slot is None:
            raise WeightSyncError(
                f"expected one of {sorted(self._missing)}, got {parameter_name}",
                hint="export parameters in the order of their specs, each once",
            )
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if (shape, dtype) != (slot.spec.shape, slot.spec.dtype):
            raise WeightSyncError(
                f"expected {slot.spec.dtype} of shape {slot.spec.shape}, "
                f"got {dtype} of shape {shape}",
                key=parameter_name,
            )
        if self.flat is None:
            self.tensors[parameter_name] = tensor.detach().contiguous()
        else:
            self.tensors[parameter_name].copy_(tensor.detach())

    @property
    def tensors_to_send(self) -> Sequence[torch.Tensor]:
        if self.flat is not None:
            return [self.flat]
        return [self.tensors[slot.spec.name] for slot in self.bucket.slots]


class PackingBuffers:
    """Two byte vectors that buckets are packed into in turn, kept from one update to the next."""

    def __init__(self, device: torch.device) -> None:
        self._flats = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def open_bucket_in_older_buffer(self, bucket: BucketPlan) -> OpenBucket:
        """Start packing; the bucket opened before the last one is overwritten."""
        free, last = self._flats
        if free.numel() < bucket.size_bytes:
            free = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=free.device)
        self._flats = [last, free]
        return OpenBucket(bucket, free[: bucket.size_bytes])


WaitSent = Callable[[], object]
SendBucket = Callable[[OpenBucket], WaitSent]
"""Begins to send a full bucket, which stays as it is until the `WaitSent` has returned."""


def fill_and_send_buckets(
    buckets: Sequence[BucketPlan],
    named_tensors: Iterator[tuple[str, torch.Tensor]],
    open_bucket: Callable[[BucketPlan], OpenBucket],
    send_bucket: SendBucket,
) -> None:
    """Fill and send all buckets; never holds more than two, whatever the model's size.

    Args:
        buckets: As planned.
        named_tensors: Every parameter of the buckets, in the order in which they were planned.
        open_bucket: Makes a bucket to be filled; the last one may still be on its way.
        send_bucket: Called when the bucket before has arrived.

    Raises:
        WeightSyncError: The parameters are not those of the buckets.
    """
    wait_sent: WaitSent | None = None
    for bucket in buckets:
        filling = open_bucket(bucket)
        while not filling.is_full:
            arrival = next(named_tensors, None)
            if arrival is None:
                raise WeightSyncError("the parameters ended before their specs did")
            filling.copy_or_hold_parameter(*arrival)
        if wait_sent is not None:
            wait_sent()
        wait_sent = send_bucket(filling)
    if wait_sent is not None:
        wait_sent()
    if (extra := next(named_tensors, None)) is not None:
        raise WeightSyncError(f"expected no parameter after the last spec, got {extra[0]}")
