"""One replica's command line. Pure: configuration and facts in, argv and environment out."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Literal

from areal_hpc.recipe.sections.inference import InferenceConfig

Device = Literal["cpu", "cuda"]

LOOPBACK = "127.0.0.1"
"""SGLang has no passwords for its control routes, so nothing else may reach it."""
UNSET_VERSION = "unset"
"""What an SGLang server calls weights that no trainer has vouched for."""
CPU_MAX_TOTAL_TOKENS = 16384
"""KV cache of a CPU replica unless the recipe names a size; SGLang would take what it finds."""

MALLOC_MMAP_THRESHOLD_BYTES = 128 * 2**20
"""More than a bucket of the default size."""


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """The TCP ports of one SGLang server, on loopback if it is all on one node."""

    http: int
    rendezvous: int
    """Where its own tensor-parallel ranks meet."""


@dataclass(frozen=True, slots=True)
class NodePart:
    """One node's part of a server that spans several."""

    node: int
    nodes: int
    meeting_point: str
    """`host:port`, on the first of the nodes."""
    host: str
    """This node's address, as the others reach it."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What to execute."""

    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the environment of the job."""


def build_replica_command(
    config: InferenceConfig,
    *,
    python: str,
    model_path: str,
    device: Device,
    index: int,
    ports: ServerPorts,
    random_seed: int,
    part: NodePart | None = None,
) -> ServerCommand:
    """The command that serves `model_path` as replica `index` of its cell, or a part of it."""
    launcher = "areal_hpc.inference.cpu.sglang_cpu" if device == "cpu" else "sglang.launch_server"
    argv = [
        *(python, "-m", launcher),
        *("--model-path", model_path),
        *("--host", LOOPBACK),
        *("--port", str(ports.http)),
        *("--nccl-port", str(ports.rendezvous)),
        *("--device", device),
        *("--dtype", config.dtype),
        *("--tp", str(config.tp)),
        *("--max-running-requests", str(config.max_running_requests)),
        *("--random-seed", str(random_seed)),
        *("--weight-version", UNSET_VERSION),
        *("--log-level-http", "warning"),
        "--incremental-streaming-output",  # otherwise each piece of a stream repeats all before
        *(_cpu_arguments(config) if device == "cpu" else _cuda_arguments(config, index)),
    ]
    if part is not None:
        argv += ["--nnodes", str(part.nodes), "--node-rank", str(part.node)]
        argv += ["--dist-init-addr", part.meeting_point]
    if config.context_length is not None:
        argv += ["--context-length", str(config.context_length)]
    if config.tool_call_parser is not None:
        argv += ["--tool-call-parser", config.tool_call_parser]
    if config.reasoning_parser is not None:
        argv += ["--reasoning-parser", config.reasoning_parser]
    environment = {"HF_HUB_OFFLINE": "1"}  # compute nodes reach no hub; do not wait for one
    if part is not None:
        # Requests go from node to node as well; SGLang would ask for the way to the internet.
        environment["SGLANG_HOST_IP"] = part.host
    if device == "cpu":
        environment |= _cpu_environment(config.tp)
    return ServerCommand((*argv, *config.extra_args), environment)


def compute_replica_seed(seed: int, cell: str, index: int, incarnation: int) -> int:
    """A sampling seed that repeats with the run's seed and differs between all replicas.

    Replicas that shared one would give the same samples to the same sequence of requests.
    """
    return zlib.crc32(f"{seed}/{cell}/{index}/{incarnation}".encode()) & 0x7FFFFFFF


def _cpu_arguments(config: InferenceConfig) -> list[str]:
    """What makes SGLang use plain torch operators, and little memory."""
    return [
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        "--disable-overlap-schedule",
        "--sleep-on-idle",  # a scheduler without requests takes a core from who shares the node
        *("--cuda-graph-backend-decode", "disabled"),
        *("--cuda-graph-backend-prefill", "disabled"),
        *("--max-total-tokens", str(config.max_total_tokens or CPU_MAX_TOTAL_TOKENS)),
        *("--mem-fraction-static", "0.1"),
    ]


def _cuda_arguments(config: InferenceConfig, index: int) -> list[str]:
    arguments = [
        *("--base-gpu-id", str(index * config.tp)),
        *("--mem-fraction-static", str(config.mem_fraction_static)),
    ]
    if config.max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(config.max_total_tokens)]
    return arguments


def _cpu_environment(tp: int) -> dict[str, str]:
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        # OpenMP threads that spin for one another cost 10x on shared cores.
        "OMP_NUM_THREADS": "1",
        # Compiled functions need a real Triton.
        "TORCHDYNAMO_DISABLE": "1",
        # SGLang asks for new memory for each bucket of new weights. What malloc keeps of the last
        # one (mallopt(3)) need not be faulted in page by page again.
        "MALLOC_MMAP_THRESHOLD_": str(MALLOC_MMAP_THRESHOLD_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(4 * MALLOC_MMAP_THRESHOLD_BYTES),
    }
    if tp > 1:
        # SGLang wants one NUMA node per rank unless the cores are named.
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp))
    return environment
