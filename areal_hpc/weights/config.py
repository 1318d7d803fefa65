"""How new weights reach the replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_hpc.config import StageConfig


class WeightsConfig(StageConfig):
    """The broadcast from trainer ranks into SGLang."""

    bucket_bytes: Annotated[int, Field(ge=4096)] = 64 * 1024 * 1024
    """Parameters travel in buckets of this size; a larger parameter gets its own."""
    replicas_per_group: Annotated[int, Field(ge=1)] = 1
    """Replicas that share one process group, and so one failure."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """`retract` recomputes KV, so versions are exact; `in_place` keeps old KV, even of prefixes."""
    update_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Deadline of every single wait in an update."""
    verify_checksum: bool = True
    """Compare the checksums of the replica's tensors with the trainer's after each update."""
