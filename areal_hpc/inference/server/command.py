"""One replica's command line. Pure: configuration and facts in, argv and environment out."""

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
"""Version that an SGLang server reports for weights that no trainer has vouched for."""
CPU_DEFAULT_MAX_TOTAL_TOKENS = 16384
"""KV cache of a CPU replica unless the recipe names a size; SGLang would take what it finds."""

_MALLOC_MMAP_THRESHOLD_BYTES = 128 * 2**20
"""More than a bucket of the default size."""
_CPU_OPTIONS = {
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--disable-overlap-schedule": True,
    "--sleep-on-idle": True,  # a scheduler without requests takes a core from who shares the node
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
}
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # OpenMP threads that spin for one another cost 10x on shared cores.
    "OMP_NUM_THREADS": "1",
    # Compiled functions need a real Triton.
    "TORCHDYNAMO_DISABLE": "1",
    # SGLang asks for new memory for each bucket of new weights. What malloc keeps of the last
    # one (mallopt(3)) need not be faulted in page by page again.
    "MALLOC_MMAP_THRESHOLD_": str(_MALLOC_MMAP_THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(4 * _MALLOC_MMAP_THRESHOLD_BYTES),
}


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """The TCP ports of one SGLang server, on loopback if it is all on one node."""

    http: int
    rendezvous: int
    """Where its own tensor-parallel ranks meet."""

    @property
    def meeting_point(self) -> str:
        """`host:port`, as other nodes reach it."""
        return f"{get_advertised_host()}:{self.rendezvous}"


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """One node's part of a server that spans several."""

    node: int
    nodes: int
    meeting_point: str
    """`host:port`, on the first of the nodes."""
    host: str
    """This node's address, as the others reach it."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the environment of the job."""
    keys: ServerKeys = NO_KEYS
    """What the server asks of its callers; without any it answers everybody on its node."""


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
    """The command that serves `model_path` as replica `index` of its cell, or a part of it.

    A model that `reads_images` is served without its towers. With `returns_routes` the server says
    which experts tokens visited, to requests that ask. With `updates_in_place` weights change
    between two steps of generations under way. Tokens are stamped with `weight_version` until the
    first update. With an `adapter` updates bring its tensors alone.
    """
    module = "cpu.sglang_cpu" if device == "cpu" else "server.sglang_main"
    launcher = f"areal_hpc.inference.{module}"
    environment = {"HF_HUB_OFFLINE": "1"}  # compute nodes reach no hub; do not wait for one
    options: dict[str, object] = {
        "--model-path": model_path,
        "--host": LOOPBACK_ADDRESS,  # the rest of the network has no business there
        "--port": ports.http,
        "--nccl-port": ports.rendezvous,
        "--device": device,
        "--dtype": dtype,
        "--tp": config.tp,
        "--max-running-requests": config.max_running_requests,
        "--random-seed": random_seed,
        "--weight-version": weight_version,
        "--log-level-http": "warning",
        "--incremental-streaming-output": True,  # else each piece of a stream repeats all before
    }
    if dtype != "float32":
        # Logits in float32, as the trainer computes them: rounded ones say other probabilities.
        options["--enable-fp32-lm-head"] = True
    if returns_routes:
        options["--enable-return-routed-experts"] = True
    if adapter is not None:
        environment[ADAPTER_VARIABLE] = _describe_adapter(adapter)
        options |= {"--enable-lora": True, "--max-lora-rank": adapter.rank}
        options |= {"--max-loras-per-batch": 2}  # the base has a place, too
        options["--lora-target-modules"] = adapter.served_modules
        if device == "cpu":
            options["--lora-backend"] = "torch_native"
    if device == "cpu":
        options |= _CPU_OPTIONS
        options["--max-total-tokens"] = config.max_total_tokens or CPU_DEFAULT_MAX_TOTAL_TOKENS
        options["--mem-fraction-static"] = 0.1
        environment |= _CPU_ENVIRONMENT
        if config.tp > 1:
            # SGLang wants one NUMA node per rank unless the cores are named.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(config.tp)))
    else:
        options["--base-gpu-id"] = index * config.tp
        options["--mem-fraction-static"] = config.mem_fraction_static
        options["--max-total-tokens"] = config.max_total_tokens
        if updates_in_place:
            # Else a step may be under way as SGLang takes the weights in: its token would be
            # stamped with the new version, and computed with either.
            options["--disable-overlap-schedule"] = True
    if node_options is not None:
        options |= {"--nnodes": node_options.nodes, "--node-rank": node_options.node}
        options["--dist-init-addr"] = node_options.meeting_point
        # Requests go from node to node as well; SGLang would ask for the way to the internet.
        environment["SGLANG_HOST_IP"] = node_options.host
    if serves_metrics:
        options["--enable-metrics"] = True
    if reads_images:  # as a checkpoint without towers says of itself
        options["--json-model-override-args"] = '{"language_model_only": true}'
    options["--context-length"] = config.context_length
    options["--tool-call-parser"] = config.tool_call_parser
    options["--reasoning-parser"] = config.reasoning_parser
    given = ((name, value) for name, value in options.items() if value is not None)
    words = [[name, *_list_values(value)] for name, value in given]
    argv = (python, "-m", launcher, *chain.from_iterable(words), *config.extra_args)
    return ServerCommand(argv, environment)


def _list_values(value: object) -> list[str]:
    if value is True:
        return []
    return [*value] if isinstance(value, tuple) else [str(value)]


def _describe_adapter(adapter: LoraConfig) -> str:
    """An adapter's settings in PEFT's terms, as JSON."""
    return json.dumps(
        {
            "peft_type": "LORA",
            "r": adapter.rank,
            "lora_alpha": adapter.scaling * adapter.rank,
            "target_modules": adapter.served_modules,
        }
    )


def compute_replica_seed(seed: int, cell: str, index: int, incarnation: int) -> int:
    """A sampling seed that repeats with the run's seed and differs between all replicas.

    Replicas that shared one would give the same samples to the same sequence of requests.
    """
    return zlib.crc32(f"{seed}/{cell}/{index}/{incarnation}".encode()) & 0x7FFFFFFF
