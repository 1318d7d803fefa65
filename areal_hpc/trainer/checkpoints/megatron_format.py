"""Checkpoints of format 1, as Megatron writes them: they are read, and written no more."""

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from areal_hpc.rundir.checkpoint_index import Column, build_checkpoint_damage_error
from areal_hpc.trainer.checkpoints.flat_ranges import Box

_PREFIX_BY_COLUMN: dict[Column, str] = {
    "master": "optimizer.state.param.",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
    "weight": "",
}


class MegatronTensors:
    """The tensors of a checkpoint of format 1, whose pieces PyTorch's reader finds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reader = FileSystemReader(directory)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def count_optimizer_steps(self, prefix: str = "") -> int:
        """Steps that AdamW has counted: Megatron has them with AdamW's settings."""
        parts: dict[Any, Any] = load_common_state_dict(str(self._directory))["optimizer"]
        if "optimizer" in parts:  # there was one optimizer alone: no experts
            parts = {0: parts}
        steps = {
            int(group["step"])
            for part in parts.values()
            for group in part["optimizer"]["param_groups"]
        }
        (count,) = steps
        return count

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the column `weight`."""
        (dtype,) = {
            stored.properties.dtype
            for name, stored in self._stored.items()
            if not name.startswith("optimizer.")
        }
        return dtype

    def has_column(self, column: Column) -> bool:
        """Whether there are tensors of the column."""
        return any(name.startswith(_PREFIX_BY_COLUMN[column]) for name in self._stored)

    def find_shape(self, tensor_name: str) -> tuple[int, ...] | None:
        """The whole tensor's shape; None if there is no such tensor."""
        stored = self._stored.get(tensor_name)
        return tuple(stored.size) if stored else None

    def read_block(self, column: Column, tensor_name: str, box: Box, target: torch.Tensor) -> None:
        """Put a block of a tensor together from what PyTorch's reader finds of it."""
        key = _PREFIX_BY_COLUMN[column] + tensor_name
        stored = self._stored[key]
        wanted = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        whole = torch.empty(wanted.sizes, dtype=stored.properties.dtype)
        plan = LoadPlan(create_read_items_for_chunk_list(key, stored, [wanted]))
        try:
            self._reader.read_data(plan, _TensorLoadPlanner(whole)).wait()
        except FileNotFoundError:
            raise
        except (RuntimeError, EOFError, OSError, CheckpointException) as error:
            raise build_checkpoint_damage_error(self._directory / key, error) from error
        target.copy_(whole)

    def close(self) -> None:
        """PyTorch's reader opens a file for each read."""


class _TensorLoadPlanner(DefaultLoadPlanner):
    """Puts the pieces of one part of a tensor into `target`."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target
