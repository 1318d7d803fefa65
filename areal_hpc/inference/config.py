"""Configuration of the inference process, and the commands of its SGLang servers."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from areal_hpc.inference.server.command import (
    UNSET_WEIGHT_VERSION,
    Device,
    NodeOptions,
    ServerCommand,
    ServerPorts,
    build_replica_command,
    compute_replica_seed,
)
from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.jobs.node import (
    DEVICES_DIR,
    get_advertised_host,
    get_task_log_dir,
    list_device_files,
    parse_visible_device_ids,
)
from areal_hpc.recipe.sections.trainer import Device as RecipeDevice
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.replicas import generate_server_keys
from areal_hpc.wire.trajectory import read_mixture_shape

WORKER_NODE_ENTRY = "areal_hpc.inference.multi_node:run"
"""Entry of the process on a cell's other nodes; it has the same configuration."""


class InferenceJobConfig(ProcessConfig):
    ENTRY = "areal_hpc.inference.job:run"
    ROLE = "agents"

    cell: str
    """`cell-0`, `cell-1`, ..."""
    model_path: Path
    """Initial weights in Hugging Face format."""
    serve_python: str
    """Interpreter with SGLang."""
    loaded_version: str = ""
    """Version under which the initial weights are served; empty: servers wait for a trainer's."""


def build_server_command(
    job: InferenceJobConfig,
    index: int,
    incarnation: int,
    ports: ServerPorts,
    node_options: NodeOptions | None = None,
) -> ServerCommand:
    """Build the command of one start of a replica, by default of its first node's part."""
    recipe = job.recipe
    nodes = recipe.inference.nodes_per_replica
    if node_options is None and nodes > 1:
        node_options = NodeOptions(0, nodes, ports.meeting_point, get_advertised_host())
    lora = recipe.trainer.lora
    model_config = json.loads((job.model_path / "config.json").read_bytes())
    command = build_replica_command(
        recipe.inference,
        python=job.serve_python,
        model_path=str(job.model_path),
        device=resolve_device(recipe.trainer.device),
        dtype=recipe.trainer.dtype,
        index=index,
        ports=ports,
        random_seed=compute_replica_seed(recipe.seed, job.cell, index, incarnation),
        updates_in_place=recipe.weights.pause_mode == "in_place",
        returns_routes=recipe.trainer.router_replay
        and read_mixture_shape(job.model_path) is not None,
        serves_metrics=recipe.cluster.prometheus,
        reads_images="vision_config" in model_config,
        weight_version=job.loaded_version or UNSET_WEIGHT_VERSION,
        adapter=lora if lora and lora.sync == "adapter" and not job.loaded_version else None,
        node_options=node_options,
    )
    return replace(
        command,
        environment=command.environment | recipe.cluster.serve.variables,
        keys=generate_server_keys(),
    )


def get_server_log_dir(job: InferenceJobConfig, paths: RunPaths) -> Path:
    return get_task_log_dir(paths.log_dir(max(paths.list_attempts(), default=1)) / job.cell)


def resolve_device(
    device: RecipeDevice,
    environ: Mapping[str, str] = os.environ,
    devices_dir: Path = DEVICES_DIR,
) -> Device:
    """Return the recipe's device; for `auto` the GPU if this node has a visible one."""
    if device != "auto":
        return device
    return (
        "cuda"
        if list_device_files(devices_dir) and parse_visible_device_ids(environ) != ()
        else "cpu"
    )
