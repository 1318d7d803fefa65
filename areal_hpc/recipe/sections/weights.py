"""Recipe section `weights`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from areal_hpc.recipe.base import BaseConfig

DEFAULT_MAX_NCCL_GROUPS = 4
"""Update groups over NCCL, unless the recipe says how large they are."""


class WeightsConfig(BaseConfig):
    """From trainer ranks into SGLang."""

    transport: Literal["broadcast", "disk"] = "broadcast"
    """`broadcast`: NCCL (gloo on CPU); `disk`: through files in the run directory."""
    bucket_bytes: Annotated[int, Field(ge=4096)] | None = None
    """Size of buckets, and by disk of files; null: 512 MiB from GPUs, 64 MiB from CPUs."""
    replicas_per_group: Annotated[int, Field(ge=1)] | None = None
    """Replicas per update group, which fail together; null: 1 on CPUs, 4 groups or less on GPUs."""
    senders: Annotated[int, Field(ge=1)] | None = None
    """Trainer ranks that send, each to a share of the replicas; null: one on each trainer node."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """`retract` recomputes KV, so versions are exact; `in_place` keeps old KV, even of prefixes."""
    # A replica that hangs holds up the others for one such wait. What has to fit in: the joining
    # of a group, and one bucket (512 MiB take 17 s even at 250 Mbit/s) or, from disk, all of them.
    update_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of each step of an update, such as one bucket (with disk: all)."""
    max_probe_gap: Annotated[float, Field(gt=0)] | None = None
    """Mean gap of log-probabilities that is rounding; null: 0.001 in float32, 0.25 in bfloat16."""

    @model_validator(mode="after")
    def _check_broadcast_only_keys(self) -> Self:
        if (self.senders or 1) > 1 and self.transport == "disk":
            raise ValueError(
                "weights.senders is for weights.transport=broadcast: from disk every replica loads "
                "by itself"
            )
        if (self.replicas_per_group or 1) > 1 and self.transport == "disk":
            raise ValueError(
                "weights.replicas_per_group is for weights.transport=broadcast: from disk every "
                "replica loads by itself"
            )
        return self
