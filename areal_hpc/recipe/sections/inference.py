"""Recipe sections `inference`, `proxy`, `shards` and `weights`: serving, recording, updates."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_hpc.recipe.base import BaseConfig

_KEYS = "every server has keys of its own; leave it out"
_QUANTIZING = (
    "a server that quantizes holds other weights than the trainer sends, so no update could be "
    "verified, and its log-probabilities are not the policy's; leave it out and serve in "
    "trainer.dtype"
)
_DRAFTS = (
    "no update reaches the model that drafts tokens, whose guesses would get worse with every "
    "step; leave it out"
)
_RANKS = (
    "an update is sent to the tensor-parallel ranks of one model, and others would keep their "
    "weights or never join; use inference.tp and inference.replicas_per_cell"
)
_OWN = "the recipe's own keys decide it; leave it out"
REFUSED_SGLANG_OPTIONS = {
    **dict.fromkeys(("--api-key", "--admin-api-key", "--tokenizer-worker-num"), _KEYS),
    **dict.fromkeys(("--quantization", "--quantize-and-serve", "--modelopt-quant"), _QUANTIZING),
    "--rl-quant-profile": _QUANTIZING,
    **dict.fromkeys(("--speculative-algorithm", "--speculative-draft-model-path"), _DRAFTS),
    **dict.fromkeys(("--dp-size", "--enable-dp-attention", "--pp-size", "--nnodes"), _RANKS),
    **dict.fromkeys(("--disaggregation-mode", "--weight-cache-mode"), _RANKS),
    **dict.fromkeys(("--tp-size", "--dtype", "--model-path", "--device", "--base-gpu-id"), _OWN),
    **dict.fromkeys(("--host", "--port", "--nccl-port", "--random-seed"), _OWN),
    "--enable-memory-saver": "no replica ever gives its memory back; leave it out",
}
"""Reasons for which a recipe cannot give these options of SGLang (0.5.23)."""
_SHORT_OPTIONS = {
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
    "--pp": "--pp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--model": "--model-path",
}


class InferenceConfig(BaseConfig):
    """SGLang replicas, grouped in cells."""

    cells: Annotated[int, Field(ge=1)] = 1
    """Groups of servers with a proxy and a driver, each a job on nodes of its own."""
    replicas_per_cell: Annotated[int, Field(ge=1)] = 1
    """SGLang servers in one cell."""
    tp: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel ranks of one replica."""
    nodes_per_replica: Annotated[int, Field(ge=1)] = 1
    """Nodes that share the ranks of one replica; with more than one, a cell has one replica."""
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    """Requests that a replica decodes concurrently; null: SGLang decides by the free memory."""
    max_total_tokens: Annotated[int, Field(ge=256)] | None = None
    """Tokens in the KV cache; null: SGLang decides by the free memory."""
    context_length: Annotated[int, Field(ge=64)] | None = None
    """Maximum number of tokens of prompt and reply; null: the model's limit."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of GPU memory for weights and KV cache."""
    tool_call_parser: str | None = None
    """SGLang's name of the model's tool-call format, such as `qwen25`."""
    reasoning_parser: str | None = None
    """SGLang's name of the model's reasoning format, such as `qwen3`."""
    extra_args: tuple[str, ...] = ()
    """Further command-line arguments of SGLang, appended unchanged."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time after which a replica that is not ready is restarted."""
    health_timeout_s: Annotated[float, Field(ge=6)] = 60.0
    """Time without an answer after which a replica is restarted (updates excluded)."""
    max_restarts: Annotated[int, Field(ge=0)] = 20
    """Crashes of one replica before its cell fails; reset after ten minutes without a crash."""

    @field_validator("extra_args")
    @classmethod
    def _refuse_options(cls, extra_args: tuple[str, ...]) -> tuple[str, ...]:
        for option in (argument.partition("=")[0] for argument in extra_args):
            if reason := REFUSED_SGLANG_OPTIONS.get(_SHORT_OPTIONS.get(option, option)):
                raise ValueError(f"{option} cannot be given: {reason}")
        return extra_args

    @model_validator(mode="after")
    def _check_nodes_per_replica(self) -> Self:
        nodes = self.nodes_per_replica
        if self.tp % nodes:
            raise ValueError(
                f"inference.tp={self.tp} ranks cannot be shared evenly by "
                f"inference.nodes_per_replica={nodes} nodes"
            )
        if nodes > 1 and self.replicas_per_cell > 1:
            raise ValueError(
                f"a replica that spans inference.nodes_per_replica={nodes} nodes has its cell to "
                f"itself, got inference.replicas_per_cell={self.replicas_per_cell}; use more cells"
            )
        return self


class ShardConfig(BaseConfig):
    """Sealing of shards."""

    seal_after_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time from the first finished ticket to a seal."""


class ProxyConfig(BaseConfig):
    """OpenAI-compatible endpoint of a cell."""

    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of one model call, with the wait for a replica."""
    session_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Idle time after which a session is dropped, if all sessions of its ticket are idle."""
    message_normalizer: str | None = None
    """`package.module:function` that normalizes each message before comparison and rendering."""


DEFAULT_MAX_NCCL_GROUPS = 4
"""Number of update groups over NCCL if the recipe does not set their size."""


class WeightsConfig(BaseConfig):
    """Updates of weights from trainer ranks to SGLang."""

    transport: Literal["broadcast", "disk"] = "broadcast"
    """`broadcast`: NCCL (gloo on CPU); `disk`: through files in the run directory."""
    bucket_bytes: Annotated[int, Field(ge=4096)] | None = None
    """Size of buckets, or of files with disk; null: 512 MiB from GPUs, 64 MiB from CPUs."""
    replicas_per_group: Annotated[int, Field(ge=1)] | None = None
    """Replicas of one group, which fail together; null: 1 on CPUs, at most 4 groups on GPUs."""
    senders: Annotated[int, Field(ge=1)] | None = None
    """Trainer ranks that send, each to a share of the replicas; null: one on each trainer node."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """`retract` recomputes KV, so versions are exact; `in_place` keeps old KV, even of prefixes."""
    # A replica that hangs delays the others by one timeout. It must be long enough to join a
    # group, and to send one bucket (512 MiB take 17 s even at 250 Mbit/s) or load all from disk.
    update_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of each step of an update, such as one bucket (with disk: all)."""
    max_probe_gap: Annotated[float, Field(gt=0)] | None = None
    """Mean gap of log-probabilities due to rounding; null: 0.001 in float32, 0.25 in bfloat16."""

    @property
    def goes_by_files(self) -> bool:
        """Whether each replica loads whole models by itself, without update groups."""
        return self.transport == "disk"

    @model_validator(mode="after")
    def _check_broadcast_only_keys(self) -> Self:
        for name in ("senders", "replicas_per_group"):
            if (getattr(self, name) or 1) > 1 and self.goes_by_files:
                raise ValueError(
                    f"weights.{name} is for weights.transport=broadcast: from {self.transport} "
                    "every replica loads by itself"
                )
        return self
