"""Command line and environment variables of a replica's SGLang server. Pure."""

import json
import zlib
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from areal_hpc.jobs.node import LOOPBACK_ADDRESS, get_advertised_host
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.recipe.sections.trainer import Dtype, LoraConfig
from areal_hpc.wire.replicas import ADAPTER_VARIABLE, NO_KEYS, ServerKeys

Device = Literal["cpu", "cuda"]

UNSET_WEIGHT_VERSION = "unset"
"""Version that an SGLang server reports before its weights are verified."""
CPU_DEFAULT_MAX_TOTAL_TOKENS = 16384
"""KV cache of a CPU replica if the recipe names no size; SGLang would use all free memory."""

_MALLOC_MMAP_THRESHOLD_BYTES = 128 * 2**20
"""Threshold above the size of a default bucket of weights."""
_CPU_OPTIONS = {
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--disable-overlap-schedule": True,
    "--sleep-on-idle": True,  # otherwise an idle scheduler occupies a core
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
}
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # OpenMP threads that spin for each other are 10 times slower on shared cores.
    "OMP_NUM_THREADS": "1",
    # Compiled functions need a real Triton.
    "TORCHDYNAMO_DISABLE": "1",
    # SGLang allocates memory for each bucket of new weights. If malloc keeps that of the last one
    # (mallopt(3)), its pages need no new page faults.
    "MALLOC_MMAP_THRESHOLD_": str(_MALLOC_MMAP_THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(4 * _MALLOC_MMAP_THRESHOLD_BYTES),
}


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """TCP ports of one SGLang server, on loopback if the server is on one node."""

    http: int
    rendezvous: int
    """Port of the rendezvous of its tensor-parallel ranks."""

    @property
    def meeting_point(self) -> str:
        """`host:port` for other nodes."""
        return f"{get_advertised_host()}:{self.rendezvous}"


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of one node's part of a server that spans several nodes."""

    node: int
    nodes: int
    meeting_point: str
    """`host:port` on the head node."""
    host: str
    """Address of this node for the others."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the job's environment."""
    keys: ServerKeys = NO_KEYS
    """Keys that callers need; without keys every process on the node may call the server."""


def build_replica_command(
    config: InferenceConfig,
    *,
    python: str,
    model_path: str,
    device: Device,
    dtype: Dtype,
    index: int,
    ports: ServerPorts,
    random_seed: int,
    updates_in_place: bool = False,
    returns_routes: bool = False,
    serves_metrics: bool = False,
    reads_images: bool = False,
    weight_version: str = UNSET_WEIGHT_VERSION,
    adapter: LoraConfig | None = None,
    node_options: NodeOptions | None = None,
) -> ServerCommand:
    """Build the command that serves `model_path` as replica `index` of its cell, or a part of it.

    A model that `reads_images` is served without its vision towers. With `returns_routes` the
    server returns the experts that tokens visited, on request. With `updates_in_place` weights
    change between two steps of running generations. Tokens carry `weight_version` until the first
    update. With an `adapter` updates consist of its tensors only.
    """
    module = "cpu.sglang_cpu" if device == "cpu" else "server.sglang_main"
    launcher = f"areal_hpc.inference.{module}"
    environment = {"HF_HUB_OFFLINE": "1"}  # compute nodes cannot reach the hub
    options: dict[str, object] = {
        "--model-path": model_path,
        "--host": LOOPBACK_ADDRESS,  # other hosts must not reach it
        "--port": ports.http,
        "--nccl-port": ports.rendezvous,
        "--device": device,
        "--dtype": dtype,
        "--tp": config.tp,
        "--max-running-requests": config.max_running_requests,
        "--random-seed": random_seed,
        "--weight-version": weight_version,
        "--log-level-http": "warning",
        "--incremental-streaming-output": True,  # otherwise each chunk repeats all text
    }
    if dtype != "float32":
        # Logits in float32, like the trainer's: rounded ones give other probabilities.
        options["--enable-fp32-lm-head"] = True
    if returns_routes:
        options["--enable-return-routed-experts"] = True
    if adapter is not None:
        environment[ADAPTER_VARIABLE] = _describe_adapter(adapter)
        options |= {"--enable-lora": True, "--max-lora-rank": adapter.rank}
        options |= {"--max-loras-per-batch": 2}  # the base model takes a slot, too
        options["--lora-target-modules"] = adapter.served_modules
        if device == "cpu":
            options["--lora-backend"] = "torch_native"
    if device == "cpu":
        options |= _CPU_OPTIONS
        options["--max-total-tokens"] = config.max_total_tokens or CPU_DEFAULT_MAX_TOTAL_TOKENS
        options["--mem-fraction-static"] = 0.1
        environment |= _CPU_ENVIRONMENT
        if config.tp > 1:
            # Without named cores SGLang requires a NUMA node per rank.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(config.tp)))
    else:
        options["--base-gpu-id"] = index * config.tp
        options["--mem-fraction-static"] = config.mem_fraction_static
        options["--max-total-tokens"] = config.max_total_tokens
        if updates_in_place:
            # Otherwise a step may run while SGLang loads the weights: its token would carry the new
            # version, but be computed with either.
            options["--disable-overlap-schedule"] = True
    if node_options is not None:
        options |= {"--nnodes": node_options.nodes, "--node-rank": node_options.node}
        options["--dist-init-addr"] = node_options.meeting_point
        # Requests go between nodes, too; SGLang would use the address that reaches the internet.
        environment["SGLANG_HOST_IP"] = node_options.host
    if serves_metrics:
        options["--enable-metrics"] = True
    if reads_images:  # the setting of a checkpoint without towers
        options["--json-model-override-args"] = '{"language_model_only": true}'
    options["--context-length"] = config.context_length
    options["--tool-call-parser"] = config.tool_call_parser
    options["--reasoning-parser"] = config.reasoning_parser
    present = ((name, value) for name, value in options.items() if value is not None)
    words = [[name, *_list_values(value)] for name, value in present]
    argv = (python, "-m", launcher, *chain.from_iterable(words), *config.extra_args)
    return ServerCommand(argv, environment)


def _list_values(value: object) -> list[str]:
    if value is True:
        return []
    return [*value] if isinstance(value, tuple) else [str(value)]


def _describe_adapter(adapter: LoraConfig) -> str:
    """Format an adapter's settings as JSON, in the form of PEFT."""
    return json.dumps(
        {
            "peft_type": "LORA",
            "r": adapter.rank,
            "lora_alpha": adapter.scaling * adapter.rank,
            "target_modules": adapter.served_modules,
        }
    )


def compute_replica_seed(seed: int, cell: str, index: int, incarnation: int) -> int:
    """Compute a sampling seed from the run's seed that differs between all replicas.

    Replicas with equal seeds would give equal samples to equal sequences of requests.
    """
    return zlib.crc32(f"{seed}/{cell}/{index}/{incarnation}".encode()) & 0x7FFFFFFF
