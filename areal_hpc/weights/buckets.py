"""Buckets of weights: planning which parameters travel together, filling, sending in a pipeline.

The format of a packed bucket is SGLang's `flattened_bucket`
(sglang/srt/weight_sync/tensor_bucket.py): one uint8 vector, tensors end to end without padding, in
the order of their names. SGLang refuses a tensor whose byte offset is not a multiple of its item
size; ordering a bucket by falling item size aligns every offset. In a bucket that is not packed
every tensor is one message. In both cases names, dtypes and shapes travel separately as JSON.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from areal_hpc.errors import WeightSyncError

CPU_BUCKET_BYTES = 64 * 2**20
"""Size whose transfer over gloo takes far longer than the calls that announce it; SGLang's
allocator keeps its memory (`inference/server/command.py`)."""
GPU_BUCKET_BYTES = 512 * 2**20
"""Size whose transfer, 12 ms at 45 GB/s, takes longer than a bucket's calls, some 8 ms."""
BYTES_BY_DTYPE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
}
"""Bytes per element, by torch's name of the type."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter with its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the element type, such as `bfloat16`."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * BYTES_BY_DTYPE[self.dtype]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameters sent by one broadcast, in wire order: each begins at a multiple of its item size.

    They may arrive from the trainer in another order.
    """

    specs: tuple[TensorSpec, ...]

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.specs)


def get_bucket_bytes(configured_bytes: int | None, device_type: str) -> int:
    if configured_bytes is not None:
        return configured_bytes
    return CPU_BUCKET_BYTES if device_type == "cpu" else GPU_BUCKET_BYTES


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[BucketPlan]:
    """Divide the specs into buckets, filled in arrival order.

    Args:
        specs: All parameters, in the order in which they will arrive.
        bucket_bytes: Limit of one bucket; only a parameter that is larger gets a bucket beyond the
            limit, alone.
    """
    groups: list[list[TensorSpec]] = []
    filled_bytes = 0
    for spec in specs:
        if not groups or filled_bytes + spec.size_bytes > bucket_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(spec)
        filled_bytes += spec.size_bytes
    return [
        BucketPlan(tuple(sorted(group, key=lambda spec: -BYTES_BY_DTYPE[spec.dtype])))
        for group in groups
    ]


class OpenBucket:
    """A bucket being filled: place every parameter, then send its `tensors_to_send`.

    Parameters are copied end to end into `flat_buffer`, which is one message. Without a buffer
    they stay in their own memory, one message each, and must not change until sent.

    Args:
        bucket: Parameters that belong in it.
        flat_buffer: uint8, `bucket.size_bytes` long.
    """

    def __init__(self, bucket: BucketPlan, flat_buffer: torch.Tensor | None = None) -> None:
        self.bucket = bucket
        self.flat = flat_buffer
        self.tensors: dict[str, torch.Tensor] = {}
        """Parameters by name, once the bucket is full; views of `flat` if it is packed."""
        self._missing = {spec.name: spec for spec in bucket.specs}
        if flat_buffer is not None:
            parts = flat_buffer.split([spec.size_bytes for spec in bucket.specs])
            for spec, part in zip(bucket.specs, parts, strict=True):
                dtype: torch.dtype = getattr(torch, spec.dtype)
                self.tensors[spec.name] = part.view(dtype).view(spec.shape)

    @property
    def is_full(self) -> bool:
        return not self._missing

    def place_parameter(self, parameter_name: str, tensor: torch.Tensor) -> None:
        spec = self._missing.pop(parameter_name, None)
        if spec is None:
            raise WeightSyncError(
                f"expected one of {sorted(self._missing)}, got {parameter_name}",
                hint="export parameters in the order of their specs, each once",
            )
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if (shape, dtype) != (spec.shape, spec.dtype):
            raise WeightSyncError(
                f"expected {spec.dtype} of shape {spec.shape}, got {dtype} of shape {shape}",
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
        return [self.tensors[spec.name] for spec in self.bucket.specs]


class PackingBuffers:
    """Two byte vectors into which buckets are packed in turn; later updates reuse them."""

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
"""Function that starts to send a full bucket, which stays unchanged until `WaitSent` returns."""


def send_buckets(
    buckets: Sequence[BucketPlan],
    named_tensors: Iterator[tuple[str, torch.Tensor]],
    open_bucket: Callable[[BucketPlan], OpenBucket],
    send_bucket: SendBucket,
) -> None:
    """Fill and send all buckets; hold at most two at a time, whatever the model's size.

    Args:
        buckets: Buckets of `plan_buckets`.
        named_tensors: Every parameter of the buckets, in the order in which they were planned.
        open_bucket: Creates an empty bucket; the previous one may still be in transit.
        send_bucket: Called after the previous bucket has arrived.
    """
    wait_sent: WaitSent | None = None
    for bucket in buckets:
        filling = open_bucket(bucket)
        while not filling.is_full:
            arrival = next(named_tensors, None)
            if arrival is None:
                raise WeightSyncError("the parameters ended before their specs did")
            filling.place_parameter(*arrival)
        if wait_sent is not None:
            wait_sent()
        wait_sent = send_bucket(filling)
    if wait_sent is not None:
        wait_sent()
    if (extra := next(named_tensors, None)) is not None:
        raise WeightSyncError(f"expected no parameter after the last spec, got {extra[0]}")
