"""Weights in and out in Hugging Face's form: load, stream, save.

Nothing here ever holds the whole model: tensors are read, gathered and written one by one.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open

from areal_hpc.errors import RecipeError
from areal_hpc.trainer.model.families.architecture import find_stage_of_layer
from areal_hpc.trainer.model.families.weight_map import (
    EMBEDDING_NAME,
    HfTensorSpec,
    ParamMap,
    count_tp_shards,
    get_hf_slices,
    get_shard_shape,
    to_hf,
    to_megatron,
)
from areal_hpc.trainer.model.hf_files import (
    MAX_FILE_BYTES,
    HfTensorSpecWithDtype,
    write_or_replace_hf_model_dir,
)
from areal_hpc.trainer.model.policy import Network, Policy

Slices = tuple[slice, ...]
ReadSlices = Callable[[HfTensorSpec, Slices], torch.Tensor]
"""Gives part of a Hugging Face tensor."""


class HfModelReader:
    """Tensors of a model directory by name, each read when asked for."""

    def __init__(self, model_dir: Path, key: str = "model.path") -> None:
        index = model_dir / "model.safetensors.index.json"
        if index.is_file():
            self._file_of = dict(json.loads(index.read_bytes())["weight_map"])
        elif (model_dir / "model.safetensors").is_file():
            with safe_open(model_dir / "model.safetensors", "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise RecipeError(
                f"no model.safetensors and no model.safetensors.index.json in {model_dir}",
                key=key,
                hint="save the model with save_pretrained(safe_serialization=True)",
            )
        self._dir, self._key = model_dir, key
        self._open: dict[str, Any] = {}

    def has_tensor(self, tensor_name: str) -> bool:
        return tensor_name in self._file_of

    def read_tensor(self, tensor: HfTensorSpec, slices: Slices = ()) -> torch.Tensor:
        """Some rows or columns of one tensor, or all of it, on the CPU. Reads no more than that.

        Raises:
            RecipeError: The directory has no such tensor, or one of another shape.
        """
        file = self._file_of.get(tensor.name)
        if file is None:
            raise RecipeError(f"{self._dir} has no tensor {tensor.name}", key=self._key)
        if file not in self._open:
            self._open[file] = safe_open(self._dir / file, "pt")
        stored = self._open[file].get_slice(tensor.name)
        shape = tuple(stored.get_shape())
        if shape != tensor.shape:
            raise RecipeError(
                f"{tensor.name} has shape {shape}, config.json says {tensor.shape}",
                key=self._key,
            )
        read: torch.Tensor = stored[slices or slice(None)]
        return read


@torch.no_grad()
def load_hf(network: Network, read_slices: ReadSlices) -> None:
    """Fill this rank's parameters, each from the slices of Hugging Face tensors that make it up."""
    tp = network.split.tp
    rank = parallel_state.get_tensor_model_parallel_rank()
    for parameter in network.weight_map:
        targets = [network.get_local_part(parameter)]
        if parameter.megatron == EMBEDDING_NAME:
            targets.append(network.tied_embedding_copy)
        held = [target for target in targets if target is not None]
        if not held:
            continue
        slices = get_hf_slices(parameter, network.arch, tp, rank)
        parts = [
            read_slices(tensor, part) for tensor, part in zip(parameter.hf, slices, strict=True)
        ]
        for target in held:
            target.copy_(to_megatron(parameter, parts, network.arch, tp))


def list_hf_specs(policy: Policy) -> list[HfTensorSpecWithDtype]:
    """Name, shape and dtype of every tensor that `stream_hf_tensors` yields, in order."""
    return [
        (tensor.name, tensor.shape, policy.dtype)
        for parameter in policy.weight_map
        for tensor in parameter.hf
    ]


@torch.no_grad()
def stream_hf_tensors(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Every whole tensor by its Hugging Face name, in the order of `list_hf_specs`.

    A collective over the tensor-, pipeline- and expert-parallel groups: every rank must drain it,
    and sees the same tensors. One may be a view of a live parameter: do not write to it.
    """
    for parameter in policy.weight_map:
        shards = _gather_shards(policy, _broadcast_from_owner(policy, parameter), parameter)
        tensors = to_hf(parameter, shards, policy.arch)
        for tensor, spec in zip(tensors, parameter.hf, strict=True):
            yield spec.name, tensor


def _broadcast_from_owner(policy: Policy, parameter: ParamMap) -> torch.Tensor:
    stages = parallel_state.get_pipeline_model_parallel_group()
    spread = parallel_state.get_expert_model_parallel_group()
    local = policy.get_local_part(parameter)
    if stages.size() == 1 and (parameter.expert is None or spread.size() == 1):
        assert local is not None
        return local.detach()
    if local is None:
        shape = get_shard_shape(parameter, policy.arch, policy.split.tp)
        local = torch.empty(shape, dtype=policy.dtype, device=policy.device)
    part = local.detach().contiguous()
    stage = _find_pipeline_stage(parameter, policy.arch.layers, stages.size())
    if parameter.expert is not None and spread.size() > 1 and stages.rank() == stage:
        holder = parameter.expert // policy.experts_per_rank
        dist.broadcast(part, dist.get_global_rank(spread, holder), group=spread)
    if stages.size() > 1:
        dist.broadcast(part, dist.get_global_rank(stages, stage), group=stages)
    return part


def _find_pipeline_stage(parameter: ParamMap, layers: int, stages: int) -> int:
    if parameter.layer is not None:
        return find_stage_of_layer(parameter.layer, layers, stages)
    return 0 if parameter.megatron == EMBEDDING_NAME else stages - 1


def _gather_shards(
    policy: Policy, own_shard: torch.Tensor, parameter: ParamMap
) -> list[torch.Tensor]:
    ranks = count_tp_shards(parameter, policy.split.tp)
    if ranks == 1:
        return [own_shard]
    shards = [torch.empty_like(own_shard) for _ in range(ranks)]
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather(shards, own_shard.contiguous(), group=group)
    return shards


def save_hf_model(
    policy: Policy, source_dir: Path, target_dir: Path, *, file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a model directory (`write_or_replace_hf_model_dir`) from the weights of all ranks.

    A collective. Parameters are gathered one by one, and rank 0 writes each as it comes.
    """
    tensors = stream_hf_tensors(policy)
    if dist.get_rank() == 0:
        write_or_replace_hf_model_dir(
            tensors, list_hf_specs(policy), source_dir, target_dir, file_bytes=file_bytes
        )
    for _ in tensors:  # the other ranks take part in gathering
        pass
    dist.barrier()
