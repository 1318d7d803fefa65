"""The tensors of a checkpoint, any block of which can be read: no ranks, no groups, no network.

A checkpoint holds each Megatron parameter of all layers (and experts) as one tensor with a
dimension for the layer (and the expert), in pieces that depend on the layout it was written under.
A parameter's master weights and moments have the same shape, in columns of their own.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from areal_hpc.rundir.checkpoint_index import (
    BYTES_BY_NUMBER_TYPE,
    Column,
    TensorPiece,
    get_rank_file_path,
    read_index_of_one_checkpoint,
)
from areal_hpc.trainer.checkpoints.flat_ranges import (
    Box,
    compute_flat_start_and_extent,
    compute_strides,
    intersect_boxes,
)
from areal_hpc.trainer.checkpoints.rank_file import RankFileReader

TORCH_DTYPE_BY_NUMBER_TYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StoredTensors:
    """The tensors of a checkpoint: a file of each rank, and an index of them all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index = read_index_of_one_checkpoint(directory)
        self._readers: dict[int, RankFileReader] = {}
        self._pieces: dict[tuple[str, tuple[int, ...]], list[TensorPiece]] = defaultdict(list)
        """Of each layer and expert of each tensor: there can be thousands in one tensor."""
        for name, tensor in self._index.tensors.items():
            for piece in tensor.pieces:
                self._pieces[name, piece.offsets[:-2]].append(piece)

    def count_optimizer_steps(self, prefix: str = "") -> int:
        return self._index.critic_steps if prefix else self._index.optimizer_steps

    @property
    def weight_dtype(self) -> torch.dtype:
        return TORCH_DTYPE_BY_NUMBER_TYPE[self._index.columns["weight"]]

    def has_column(self, column: Column) -> bool:
        return column in self._index.columns

    def find_shape(self, tensor_name: str) -> tuple[int, ...] | None:
        found = self._index.tensors.get(tensor_name)
        return found.shape if found else None

    def read_block(self, column: Column, tensor_name: str, box: Box, target: torch.Tensor) -> None:
        """Read a block of a tensor from the files of all ranks into `target`, of the same sizes."""
        assert all(size == 1 for size in box.sizes[:-2]), box
        for piece in self._pieces[tensor_name, box.offsets[:-2]]:
            own = Box(piece.offsets, piece.sizes)
            if (common := intersect_boxes(own, box)) is not None:
                place = common.shift_to_coordinates_within(box)
                target[place.slices].copy_(
                    self._read_part_of_piece(column, piece, common.shift_to_coordinates_within(own))
                )

    def _read_part_of_piece(self, column: Column, piece: TensorPiece, box: Box) -> torch.Tensor:
        first, count = compute_flat_start_and_extent(piece.sizes, box)
        type_ = self._index.columns[column]
        offset_bytes = self._index.compute_offset_bytes(piece.rank, column, piece.first + first)
        held = self._open_file(piece.rank).read(offset_bytes, count * BYTES_BY_NUMBER_TYPE[type_])
        flat = torch.frombuffer(held, dtype=TORCH_DTYPE_BY_NUMBER_TYPE[type_])
        return flat.as_strided(box.sizes, compute_strides(piece.sizes))

    def _open_file(self, rank: int) -> RankFileReader:
        if rank not in self._readers:
            self._readers[rank] = RankFileReader(
                get_rank_file_path(self._directory, rank), self._index.compute_data_bytes(rank)
            )
        return self._readers[rank]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


@contextmanager
def open_stored_tensors(directory: Path) -> Iterator[StoredTensors]:
    """The tensors in the directory of a complete checkpoint."""
    stored = StoredTensors(directory)
    try:
        yield stored
    finally:
        stored.close()
