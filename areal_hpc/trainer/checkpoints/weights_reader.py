"""The weights of a checkpoint, read tensor by tensor: no ranks, no groups, no network.

A checkpoint holds each Megatron parameter of all layers (and experts) as one tensor with a
dimension for the layer (and the expert), in pieces that depend on the layout it was written under.
PyTorch's checkpoint reader finds the pieces that a part of it needs, so any layout's checkpoint can
be read.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from areal_hpc.errors import RecipeError
from areal_hpc.trainer.model.families.architecture import Architecture
from areal_hpc.trainer.model.families.weight_map import ParamMap, build_weight_map, to_hf
from areal_hpc.trainer.model.hf_files import HfSpec

_STORED_NAME_BY_PARAMETER = {
    # Megatron gives norms the names they have where Transformer Engine fuses them into the layer.
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def get_stored_name(parameter: ParamMap) -> str:
    """The tensor of a checkpoint that holds this parameter of every layer and expert."""
    if parameter.layer is None:
        return parameter.megatron
    if parameter.expert is not None:
        return f"decoder.layers.mlp.experts.experts.{parameter.megatron}"
    return f"decoder.layers.{_STORED_NAME_BY_PARAMETER.get(parameter.megatron, parameter.megatron)}"


def _get_layer_expert_indices(parameter: ParamMap) -> list[int]:
    """Where in that tensor it lies."""
    return [at for at in (parameter.layer, parameter.expert) if at is not None]


class CheckpointWeights:
    """The weights in the directory of a complete checkpoint.

    Raises:
        RecipeError: The checkpoint is of another model.
    """

    def __init__(self, directory: Path, arch: Architecture) -> None:
        self._directory = directory
        self._arch = arch
        self._reader = FileSystemReader(directory)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        for parameter in build_weight_map(arch):
            self._check_parameter(parameter)

    def list_tensor_specs(self) -> list[HfSpec]:
        """Name, shape and dtype of every tensor, in the order of `read_tensors`. Reads nothing."""
        return [
            (tensor.name, tensor.shape, self._stored[get_stored_name(parameter)].properties.dtype)
            for parameter in build_weight_map(self._arch)
            for tensor in parameter.hf
        ]

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every whole tensor by its Hugging Face name; one Megatron parameter is held at a time."""
        for parameter in build_weight_map(self._arch):
            whole = self._read_parameter(parameter)
            for spec, tensor in zip(
                parameter.hf, to_hf(parameter, [whole], self._arch), strict=True
            ):
                yield spec.name, tensor

    def _read_parameter(self, parameter: ParamMap) -> torch.Tensor:
        name, place = get_stored_name(parameter), _get_layer_expert_indices(parameter)
        stored = self._stored[name]
        shape = stored.size[len(place) :]
        wanted = ChunkStorageMetadata(
            offsets=torch.Size([*place, *(0 for _ in shape)]),
            sizes=torch.Size([*(1 for _ in place), *shape]),
        )
        target = torch.empty(wanted.sizes, dtype=stored.properties.dtype)
        plan = LoadPlan(create_read_items_for_chunk_list(name, stored, [wanted]))
        self._reader.read_data(plan, _TensorLoadPlanner(target)).wait()
        return target.reshape(shape)

    def _check_parameter(self, parameter: ParamMap) -> None:
        stored = self._stored.get(get_stored_name(parameter))
        shape: tuple[int, ...] = (
            stored.size[len(_get_layer_expert_indices(parameter)) :] if stored else ()
        )
        least = sum(tensor.shape[0] for tensor in parameter.hf)
        if len(shape) != len(parameter.hf[0].shape) or shape[0] < least:
            found = tuple(stored.size) if stored else "nothing"
            raise RecipeError(
                f"the checkpoint has {found} under {get_stored_name(parameter)}, "
                f"expected {[tensor.shape for tensor in parameter.hf]}",
                key=str(self._directory),
                hint="export with the recipe that the run was trained with",
            )


class _TensorLoadPlanner(DefaultLoadPlanner):
    """Puts the pieces of one part of a tensor into `target`."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target
