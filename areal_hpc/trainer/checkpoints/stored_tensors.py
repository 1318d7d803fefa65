"""The tensors of a checkpoint, any block of which can be read: no ranks, no groups, no network.

A checkpoint holds each Megatron parameter of all layers (and experts) as one tensor with a
dimension for the layer (and the expert), in pieces that depend on the layout it was written under.
Of the optimizer there is a master weight and two moments for each, under names with a prefix.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from areal_hpc.rundir.checkpoint_index import (
    INDEX_FILE,
    StoredTensor,
    build_damage_error,
    get_rank_file,
    has_index,
    read_index,
)
from areal_hpc.trainer.checkpoints.flat_ranges import Box, intersect
from areal_hpc.trainer.checkpoints.megatron_tensors import MegatronTensors
from areal_hpc.trainer.checkpoints.rank_file import RankFileReader

class TensorSpec(NamedTuple):
    """What is known of a stored tensor without reading it."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredTensors(Protocol):
    """The tensors of a checkpoint of some format."""

    @property
    def optimizer_steps(self) -> int:
        """Steps that AdamW has counted."""

    def find_tensor(self, name: str) -> TensorSpec | None: ...
    def read_block(self, name: str, box: Box) -> torch.Tensor: ...
