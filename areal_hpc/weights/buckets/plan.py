"""Bucket plan: which parameters travel together.

A bucket is one broadcast. SGLang's `flattened_bucket` format lays tensors end to end without
padding, in the order they are named, and refuses a tensor whose byte offset is not a multiple
of its item size; ordering a bucket by falling item size makes every offset aligned.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

CPU_BUCKET_BYTES = 64 * 2**20
"""Over gloo a bucket of this size takes far longer than the calls that announce it, and SGLang's
allocator keeps its memory (`inference/server/command.py`)."""
GPU_BUCKET_BYTES = 512 * 2**20
"""A bucket costs calls of some 8 ms whatever its size; at 45 GB/s this one takes 12 ms."""
BYTES_BY_DTYPE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
}
"""Bytes of one element, by torch's name of the type."""

_FUSIBLE_PROJECTION_PATTERN = re.compile(r"\.(?:(?P<qkv>[qkv])|(?:gate|up))_proj\.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter as Hugging Face names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the element type, such as `bfloat16`."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * BYTES_BY_DTYPE[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Place of one parameter in its bucket."""

    spec: TensorSpec
    offset_bytes: int
    """Bytes from the bucket's start; a multiple of the item size."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameters sent by one broadcast, in wire order (which may differ from arrival order)."""

    slots: tuple[TensorSlot, ...]

    @property
    def size_bytes(self) -> int:
        last = self.slots[-1]
        return last.offset_bytes + last.spec.size_bytes


def get_bucket_bytes(configured_bytes: int | None, device_type: str) -> int:
    if configured_bytes is not None:
        return configured_bytes
    return CPU_BUCKET_BYTES if device_type == "cpu" else GPU_BUCKET_BYTES


def get_fused_name(parameter_name: str) -> str:
    """The name under which SGLang keeps a parameter.

    q/k/v projections become `qkv_proj`, gate and up `gate_up_proj`; others keep their name.
    """
    return _FUSIBLE_PROJECTION_PATTERN.sub(
        lambda hit: ".qkv_proj." if hit["qkv"] else ".gate_up_proj.", parameter_name
    )


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[BucketPlan]:
    """Buckets that hold every spec once, filled in arrival order.

    Parameters that SGLang fuses lie in one bucket, together with whatever arrives between
    them, so a bucket is complete as soon as its last parameter has arrived.

    Args:
        specs: All parameters, in the order in which they will arrive.
        bucket_bytes: Limit of one bucket; only a parameter (or a fused set) larger than this
            gets a bucket above the limit, of its own.

    Raises:
        ValueError: A name comes twice.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"each parameter is sent once, got these twice: {twice}")
    last_index = {get_fused_name(spec.name): index for index, spec in enumerate(specs)}
    reaches = accumulate((last_index[get_fused_name(spec.name)] for spec in specs), max)
    groups: list[list[TensorSpec]] = []
    start = filled_bytes = 0
    for index, reach in enumerate(reaches):
        if reach > index:
            continue  # within a fused set
        run, start = specs[start : index + 1], index + 1
        run_bytes = sum(spec.size_bytes for spec in run)
        if not groups or filled_bytes + run_bytes > bucket_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].extend(run)
        filled_bytes += run_bytes
    return [_lay_out_bucket(group) for group in groups]


def _lay_out_bucket(specs: Sequence[TensorSpec]) -> BucketPlan:
    ordered = sorted(specs, key=lambda spec: -BYTES_BY_DTYPE[spec.dtype])
    offsets = accumulate((spec.size_bytes for spec in ordered), initial=0)
    return BucketPlan(
        tuple(TensorSlot(spec, offset) for spec, offset in zip(ordered, offsets, strict=False))
    )
